"""Keys that preemption drops, kept in host memory until their branch goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Pages = Mapping[int, tuple[Tensor, ...]]  # layer -> k, v: [P, page, Hkv, D], or other values by slot


@dataclass(frozen=True)
class Run:
    """Consecutive keys of one path, by absolute position; ``serial`` tells its nodes from others for all time."""

    serial: int
    begin: int
    end: int
    keys: dict[int, tuple[Tensor, ...]]  # layer -> k, v: [end - begin, Hkv, D]


class HostKeys:
    """Keys of at most ``capacity`` tokens; the oldest are dropped first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._runs: OrderedDict[tuple[int, int], Run] = OrderedDict()  # by serial and begin
        self._tokens = 0

    def save(self, dropped: tuple[npt.NDArray[Any], ...], pages: Pages) -> None:
        """Copy what `KvTree.take_dropped` names, while the pages still hold it."""
        serials, positions, counts, slots = dropped
        if not len(serials) or not pages:
            return
        device = next(iter(pages.values()))[0].device
        at = torch.from_numpy(slots).to(device)
        gathered = {layer: tuple(_flat(x).index_select(0, at).cpu() for x in kv) for layer, kv in pages.items()}
        split = {layer: [x.split(counts.tolist()) for x in kv] for layer, kv in gathered.items()}
        for i, (serial, begin) in enumerate(zip(serials.tolist(), positions.tolist(), strict=True)):
            keys = {layer: tuple(x[i].clone() for x in kv) for layer, kv in split.items()}
            self._add(Run(serial, begin, begin + int(counts[i]), keys))

    def find(self, serial: int, position: int) -> Run | None:
        """A run that has the key at ``position``."""
        for run in self._runs.values():
            if run.serial == serial and run.begin <= position < run.end:
                return run
        return None

    @staticmethod
    def restore(run: Run, begin: int, slots: Tensor, pages: Pages) -> None:
        """Write the keys from position ``begin`` on to ``slots`` [N] of the pages."""
        part = slice(begin - run.begin, begin - run.begin + len(slots))
        for layer, kv in pages.items():
            for target, source in zip(kv, run.keys[layer], strict=True):
                _flat(target).index_copy_(0, slots, source[part].to(target.device))

    def clear(self) -> None:
        self._runs.clear()
        self._tokens = 0

    def _add(self, run: Run) -> None:
        before = self._runs.pop((run.serial, run.begin), None)
        self._tokens += run.end - run.begin - (before.end - before.begin if before else 0)
        self._runs[run.serial, run.begin] = run
        while self._tokens > self._capacity:
            _, oldest = self._runs.popitem(last=False)
            self._tokens -= oldest.end - oldest.begin


def _flat(pages: Tensor) -> Tensor:  # [P, page, Hkv, D] -> [slots, Hkv, D]
    return pages.view(-1, *pages.shape[2:])
