"""The CPU's threads while sampling and updates overlap: half for each, all for the one that works alone.

Both would start as many threads as there are cores, and every parallel loop would wait for whichever of its threads
got no core. PyTorch's number of threads is a setting of the thread that asks (OpenMP's), so each can have its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
