"""The surroundings of a run: CPU threads, signals that end it, and the object that shows its progress."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Progress(Protocol):
    """Told what a run does as it does it; `rolltree train` gives it a terminal (`engine/app/console.py`)."""

    def start(self, total_steps: int) -> None:
        """The run begins; ``total_steps`` counts those of an earlier, resumed part too."""

    def phase(self, text: str) -> None:
        """What it does now, such as ``sampling``."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""

    def evaluation(self, step: int, accuracy: float, n: int) -> None:
        """The held-out problems were answered after ``step`` steps, a share ``accuracy`` of all ``n`` rightly."""

    def note(self, text: str) -> None:
        """Something the user should know."""


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

        def ask(number: int, frame: object) -> None:
            self.asked = True
            restore()
            self._note(f"{signal.Signals(number).name}: the step is finished and saved; once more ends it at once.")

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        for number in SIGNALS:
            signal.signal(number, ask)
        try:
            yield
        finally:
            restore()


class Cores:
    """Who of two threads, the caller and the sampler, has how many; with ``shared`` False nothing is ever set.

    >>> cores = Cores(shared=False)
    >>> with cores.left_to_sampler():
    ...     cores.take()
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared, self.all = shared, torch.get_num_threads()
        self._caller_waits = True  # written by the caller alone

    @contextmanager
    def left_to_sampler(self) -> Iterator[None]:
        """Of the caller: while it waits."""
        self._caller_waits = True
        try:
            yield
        finally:
            self._caller_waits = False
            self._set(self.all - self.all // 2)

    @contextmanager
    def left_to_caller(self) -> Iterator[None]:
        """Of the caller: while the sampler rests."""
        before = torch.get_num_threads()
        self._set(self.all)
        try:
            yield
        finally:
            self._set(before)

    def take(self) -> None:
        """Of the sampler: before it computes."""
        self._set(self.all if self._caller_waits else max(1, self.all // 2))

    def _set(self, threads: int) -> None:
        if self.shared and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
