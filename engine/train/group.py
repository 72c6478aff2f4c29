"""The processes that train one model together, and the few values that they tell each other.

FSDP2 (`engine/model/sharding.py`) exchanges parameters and gradients. All else that the ranks must agree on (the loss,
counts of metrics, scores of trees) goes through a `Group`, and every decision of an update is made from such values, so
no rank takes another way than the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
TELL_S = 1.0
"""Seconds after which the first rank tells the others that its work is not done."""


@dataclass(frozen=True)
class Group:
    """``count`` processes, of which this one is number ``rank``; by default a process that trains alone.

    Each ``tensor`` of them in turn compute the same share of a batch, each with a part of every product.
    """

    count: int = 1
    rank: int = 0
    tensor: int = 1

    @staticmethod
    def joined() -> Group:
        """Return the group of torch.distributed's default process group, which this process has joined."""
        return Group(dist.get_world_size(), dist.get_rank())

    @property
    def shares(self) -> int:
        """Number of shares into which batches are divided."""
        return self.count // self.tensor

    @property
    def share(self) -> int:
        """Number of this process's share."""
        return self.rank // self.tensor

    def of_shares(self, value: Any) -> list[Any]:
        """Return the ``value`` of the first rank of each share; see `gather`."""
        return self.gather(value)[:: self.tensor]

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in their order; all ranks must call it. It is pickled."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def of_first(self, work: Callable[[], T]) -> T:
        """Return the value of ``work``, which the first rank alone does, in a thread; all ranks must call it.

        The others wait however long that takes, past the time limit of their collectives. An error is raised on all.
        """
        if self.count == 1:
            return work()
        done: Future[T] = Future()
        if self.rank == 0:
            threading.Thread(target=_fulfil, args=(done, work), name="rolltree-first-rank", daemon=True).start()
        while True:
            told: list[Any] = [None]
            if self.rank == 0 and wait([done], TELL_S).done:
                error = done.exception()
                told = [(error, None if error else done.result())]
            dist.broadcast_object_list(told)
            if told[0] is not None:
                error, value = told[0]
                if error is not None:
                    raise error
                result: T = value
                return result

    def added(self, sums: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """Return the sums of the numbers under each name over all shares; not every rank needs to have every name.

        The order of the additions is that of the ranks, so the sums are the same bits on all of them.
        """
        if self.count == 1:
            return dict(sums)
        total: dict[str, tuple[float, ...]] = {}
        for of_share in self.of_shares(dict(sums)):
            for name, numbers in of_share.items():
                before = total.get(name, (0.0,) * len(numbers))
                total[name] = tuple(a + b for a, b in zip(before, numbers, strict=True))
        return total


def _fulfil(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


ALONE = Group()
