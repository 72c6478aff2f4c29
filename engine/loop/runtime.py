"""The surroundings of a run: CPU threads, signals that end it, and garbage collection."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Records a request to end the run, which then ends after the current step with a checkpoint.

    Ctrl-C, SIGTERM and SIGHUP (a closed terminal) are such requests. A second Ctrl-C or SIGTERM ends the run at once.
    Under `nohup` SIGHUP stays ignored.

    Args:
        note: called with a sentence for the user at the first signal.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self.requested = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle signals within the block. Only the main thread receives signals; in others this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]

        def ask(number: int, frame: object) -> None:
            self.requested = True
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


class Cores:
    """Divides the CPU threads between trainer (the caller) and sampler. Does nothing if ``shared`` is False.

    While sampling and updates overlap, each has half of the threads, and one that works alone has all. Otherwise both
    would start as many threads as there are cores, and every parallel loop would wait for threads without a core.
    PyTorch's number of threads is a setting of the calling thread (OpenMP's), so each can have its own.

    >>> cores = Cores(shared=False)
    >>> with cores.left_to_sampler():
    ...     cores.take()
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared, self.all = shared, torch.get_num_threads()
        self._caller_waits = True  # written by the caller alone

    @contextmanager
    def left_to_sampler(self) -> Iterator[None]:
        """Give all threads to the sampler within the block, in which the caller waits."""
        self._caller_waits = True
        try:
            yield
        finally:
            self._caller_waits = False
            self._set(self.all - self.all // 2)

    @contextmanager
    def left_to_caller(self) -> Iterator[None]:
        """Give all threads to the caller within the block, in which the sampler rests."""
        before = torch.get_num_threads()
        self._set(self.all)
        try:
            yield
        finally:
            self._set(before)

    def take(self) -> None:
        """Set the threads of the sampler, which calls this before it computes."""
        self._set(self.all if self._caller_waits else max(1, self.all // 2))

    def _set(self, threads: int) -> None:
        if self.shared and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Freeze existing objects so that garbage collection skips them within the block; scanning the imported libraries
    slows small steps."""
    by_caller = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not by_caller:
            gc.unfreeze()
