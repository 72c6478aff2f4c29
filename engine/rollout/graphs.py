"""Decode steps as CUDA graphs: padded to a bucket of sizes, so that one graph serves many steps.

A step that only decodes has one row a branch. Its rows and the partial results of its attention are padded to powers
of two; padding rows read no key and write to a slot that nobody reads. All that changes from step to step is one vector
of int32, copied to the device at once; slots, ids and the plan of attention are views of it. So a replay waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rolltree.kernels.tree_decode import DecodePlan

from .kv_cache import KvCache
from .scheduler import Step

Array = npt.NDArray[Any]
LEAST_ROWS, LEAST_PARTIALS = 8, 64


class Padded:
    """A step's numbers on the device, with room for ``rows`` rows and ``partials`` partial results."""

    def __init__(self, rows: int, partials: int, pages: int, device: torch.device) -> None:
        self.partials = partials
        nodes = partials  # a node that some row reads has at least one
        sizes = {
            "input_ids": rows,
            "position": rows,
            "slots": rows,
            "page_indptr": nodes + 1,
            "page_ids": pages,
            **dict.fromkeys(("node_offset", "node_length", "node_position", "row_begin", "row_end"), nodes),
        }
        end = np.cumsum(list(sizes.values()))
        pinned = device.type == "cuda"
        self._host = torch.zeros(int(end[-1]), dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(int(end[-1]), dtype=torch.int32, device=device)
        self._places = {n: slice(int(e) - size, int(e)) for (n, size), e in zip(sizes.items(), end, strict=True)}

    @staticmethod
    def at_least_two(step: Step, spare_slot: int, device: torch.device) -> Padded:
        """For compilers, to whom a size of one is another program."""
        partials = max(count_partials(step), len(step.plan[2]), 2)
        padded = Padded(max(len(step.input_ids), 2), partials, max(len(step.plan[1]), 2), device)
        padded.load(step, spare_slot)
        return padded

    def load(self, step: Step, spare_slot: int) -> None:
        """Take a step's numbers over."""
        indptr, *others = step.plan
        names = ("page_ids", "node_offset", "node_length", "node_position", "row_begin", "row_end")
        values = {"input_ids": step.input_ids, "position": step.position_ids, "slots": step.kv_slots}
        values |= {"page_indptr": indptr, **dict(zip(names, others, strict=True))}
        rest = {"slots": spare_slot, "page_indptr": int(indptr[-1])}
        host = self._host.numpy()
        for name, place in self._places.items():
            column, new = host[place], values[name]
            column[: len(new)] = new
            column[len(new) :] = rest.get(name, 0)
        self._device.copy_(self._host, non_blocking=True)

    def view(self, name: str) -> Tensor:
        return self._device[self._places[name]]

    def begin(self, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Begin the step; its ids and positions [rows] int64."""
        cache.begin_step_on_device(self.view("slots").long(), self.plan())
        return self.view("input_ids").long(), self.view("position").long()

    def plan(self) -> DecodePlan:
        """New views each time: what a backend derives from a plan it remembers by its tensors."""
        names = ("page_indptr", "page_ids", "node_offset", "node_length", "node_position", "row_begin", "row_end")
        return DecodePlan(
            **{n: self.view(n) for n in names}, query_position=self.view("position"), partials=self.partials
        )


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
        padded = Padded(rows, partials, pages, self._device)
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
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.run(padded)
        return padded, graph, logits


def count_partials(step: Step) -> int:
    _, _, _, lengths, _, begins, ends = step.plan
    return DecodePlan.count_partials(lengths, begins, ends)


def _bucket(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
