"""Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) end a run after the step it is in, with a checkpoint.

A second Ctrl-C or SIGTERM ends it at once. Under `nohup`, which has SIGHUP ignored, it stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Whether somebody asked the run to end.

    Args:
        note: told so, in a sentence.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self.asked = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Within the block the first signal only asks. Only the main thread has signals; in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]

        def ask(number: int, frame: object) -> None:
            self.asked = True
            restore()
            if signal.SIGHUP in before:  # a closing session sends it along with SIGTERM, and more than once
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._note(f"{signal.Signals(number).name}: the step is finished and saved; once more ends it at once.")

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            restore()
