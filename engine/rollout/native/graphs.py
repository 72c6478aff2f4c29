"""Decode steps as CUDA graphs: padded to a bucket of sizes, so that one graph serves many steps.

A step that only decodes has one row a branch. Its rows and the partial results of its attention are padded to powers
of two. A graph holds the model, the head and the sampler; all that changes from step to step is the `StepVector`. So a
replay waits for nothing, and the host waits for a step when it fetches what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .draws import Drawn, Draws, draw
from .kv_cache import KvCache
from .scheduler import Step
from .step_buffer import StepVector, count_partials

LEAST_ROWS, LEAST_PARTIALS = 8, 64


class Decoded(NamedTuple):
    """Of all rows of a step, the padding's behind them; valid until the next step."""

    vector: StepVector
    logits: Tensor  # [rows, V] fp32
    drawn: Drawn


class DecodeGraphs:
    """Graphs by size, captured when a step first needs them.

    Args:
        forward: the logits of all rows from their ids and positions [N] int64, after `KvCache.begin_step`.
    """

    def __init__(self, cache: KvCache, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> None:
        self._cache = cache
        self._forward = forward
        self._device = device
        self._graphs: dict[tuple[int, int, int, tuple[str, ...]], tuple[torch.cuda.CUDAGraph, Decoded]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # one graph runs at a time

    def decode(self, step: Step, draws: Draws) -> Decoded:
        """A step that only decodes: each of its rows is sampled once."""
        rows, partials = _bucket(len(step.input_ids), LEAST_ROWS), _bucket(count_partials(step), LEAST_PARTIALS)
        kind = rows, partials, step.adapter, draws.filters
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(step, draws, rows, partials)
        graph, decoded = self._graphs[kind]
        decoded.vector.load(step, draws, self._cache.spare_slot)
        graph.replay()
        return decoded

    def run(self, vector: StepVector, filters: tuple[str, ...]) -> Decoded:
        """The step without a graph."""
        logits = self._forward(*vector.begin(self._cache))
        return Decoded(vector, logits, draw(logits, vector.draws, filters))

    def pad(self, step: Step, draws: Draws, rows: int, partials: int) -> StepVector:
        pages = 2 * self._cache.tree.num_pages  # a page has at most two nodes' keys
        vector = StepVector(rows, partials, pages, self._cache.groups, self._device, samples=rows)
        vector.load(step, draws, self._cache.spare_slot)
        return vector

    def clear(self) -> None:
        """Forget all: the weights or the pages have moved."""
        self._graphs.clear()

    def _capture(self, step: Step, draws: Draws, rows: int, partials: int) -> tuple[torch.cuda.CUDAGraph, Decoded]:
        vector = self.pad(step, draws, rows, partials)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels are compiled and libraries begin before anything is recorded
            self.run(vector, draws.filters)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # a trainer in another thread may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            decoded = self.run(vector, draws.filters)
        return graph, decoded


def _bucket(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
