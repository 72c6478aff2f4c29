"""Decode steps as CUDA graphs: padded to a bucket of sizes, so that one graph serves many steps.

A step that only decodes has one row a branch. Its rows and the partial results of its attention are padded to powers
of two; padding rows read no key and write to a slot that nobody reads. All that changes from step to step is one vector
of int32, copied to the device at once; slots, ids, the plan of attention and its schedule are views of it. So a replay
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels.tree_decode import DecodePlan
from rolltree.kernels.tree_decode import schedule as schedules
from rolltree.kernels.tree_decode.plan import host_columns, lay_out

from .kv_cache import KvCache
from .scheduler import Step

Array = npt.NDArray[Any]
LEAST_ROWS, LEAST_PARTIALS = 8, 64


class Padded:
    """A step's numbers on the device, with room for ``rows`` rows and ``partials`` partial results.

    Args:
        groups: query heads a key head, of all layers.
    """

    def __init__(self, rows: int, partials: int, pages: int, groups: Sequence[int], device: torch.device) -> None:
        self.partials = partials
        self._groups = groups
        nodes = partials  # a node that some row reads has at least one, and so has an item
        sizes = {
            **dict.fromkeys(("input_ids", "slots", "query_position"), rows),
            "page_indptr": nodes + 1,
            **dict.fromkeys(("node_offset", "node_length", "node_position", "row_begin", "row_end"), nodes),
            "partial_begin": rows + 1,
            **{f"items{group}": (1 + partials) * schedules.FIELDS for group in groups},
            "page_ids": pages,
        }
        self._places, length = lay_out(sizes)
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(length, dtype=torch.int32, device=device)

    @staticmethod
    def at_least_two(step: Step, cache: KvCache, device: torch.device) -> Padded:
        """For compilers, to whom a size of one is another program."""
        partials = max(count_partials(step), len(step.plan[2]), 2)
        padded = Padded(max(len(step.input_ids), 2), partials, max(len(step.plan[1]), 2), cache.groups, device)
        padded.load(step, cache.spare_slot)
        return padded

    def load(self, step: Step, spare_slot: int) -> None:
        """Take a step's numbers over."""
        columns = host_columns((*step.plan, step.position_ids.astype(np.int32)), self._groups)
        values = {"input_ids": step.input_ids, "slots": step.kv_slots, **columns}
        ends = {name: int(values[name][-1]) for name in ("page_indptr", "partial_begin")}
        rest = {"slots": spare_slot, **ends}
        host = self._host.numpy()
        for name, new in values.items():
            column = host[self._places[name]]
            column[: len(new)] = new
            if name != "page_ids":  # what lies beyond them no node names
                column[len(new) :] = rest.get(name, 0)
        used = self._places["page_ids"].start + len(columns["page_ids"])
        self._device[:used].copy_(self._host[:used], non_blocking=True)

    def view(self, name: str) -> Tensor:
        return self._device[self._places[name]]

    def begin(self, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Begin the step; its ids and positions [rows] int64."""
        cache.begin_step_on_device(self.view("slots").long(), self.plan())
        return self.view("input_ids").long(), self.view("query_position").long()

    def plan(self) -> DecodePlan:
        return DecodePlan.of_columns({name: self.view(name) for name in self._places}, self.partials)


class DecodeGraphs:
    """Graphs by size, captured when a step first needs them.

    Args:
        forward: the logits of all rows from their ids and positions [N] int64, after `KvCache.begin_step_on_device`.
    """

    def __init__(self, cache: KvCache, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
        self._cache = cache
        self._forward = forward
        self._device = device
        self._graphs: dict[tuple[int, int, int], tuple[Padded, torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # one graph runs at a time

    def logits(self, step: Step) -> Tensor:  # [S, V] fp32, valid until the next step
        """Of the rows of a step that only decodes: each of them samples."""
        size = _bucket(len(step.input_ids), LEAST_ROWS), _bucket(count_partials(step), LEAST_PARTIALS), step.adapter
        if size not in self._graphs:
            self._graphs[size] = self._capture(step, *size[:2])
        padded, graph, logits = self._graphs[size]
        padded.load(step, self._cache.spare_slot)
        graph.replay()
        return logits[: len(step.input_ids)]

    def run(self, padded: Padded) -> Tensor:  # [rows, V] fp32
        """The step without a graph."""
        return self._forward(*padded.begin(self._cache))

    def pad(self, step: Step, rows: int, partials: int) -> Padded:
        pages = 2 * self._cache.tree.num_pages  # a page has at most two nodes' keys
        padded = Padded(rows, partials, pages, self._cache.groups, self._device)
        padded.load(step, self._cache.spare_slot)
        return padded

    def clear(self) -> None:
        """Forget all: the weights or the pages have moved."""
        self._graphs.clear()

    def _capture(self, step: Step, rows: int, partials: int) -> tuple[Padded, torch.cuda.CUDAGraph, Tensor]:
        padded = self.pad(step, rows, partials)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels are compiled and libraries begin before anything is recorded
            self.run(padded)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # a trainer in another thread may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self.run(padded)
        return padded, graph, logits


def count_partials(step: Step) -> int:
    _, _, _, lengths, _, begins, ends = step.plan
    return schedules.count_partials(lengths, begins, ends)


def _bucket(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
