"""Compiled and captured steps: decoder layers through torch.compile, decode steps as CUDA graphs.

The layers of a decoder are one program on different weights and pages. A compiled program is specialised to every
constant that it was traced with, so each layer gets the pages that it writes and reads as tensors (`LayerPages`) and
its index is never read. Each kind of layer (with and without a sliding window) is a program of its own.

A step that only decodes has one row a branch. Its rows and the partial results of its attention are padded to powers
of two, so that one graph serves many steps. A graph holds the model, the head and the sampler; all that changes from
step to step is the `StepVector`. A replay waits for nothing; the host waits for a step when it fetches the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.fx.experimental import _config as symbols
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UserError
from .assembly import Step
from .cache.kv_cache import KvCache
from .draws import DeviceSamples, Draws, device_samples, draw
from .step_buffer import StepVector, count_partials

Array = npt.NDArray[Any]
LEAST_ROWS, LEAST_PARTIALS = 8, 64


class CompiledLayers:
    """Compiled forms of a decoder's layers, which `substituted` puts in their place.

    Raises:
        UserError: no module of the decoder is a Transformers ``GradientCheckpointingLayer`` with attention.
    """

    def __init__(self, decoder: nn.Module, cache: KvCache) -> None:
        layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)]
        self._layers = [(layer, n) for layer in layers if (n := layer_number(layer)) is not None]
        if not self._layers:
            raise UserError(
                f"The layers of {type(decoder).__name__} cannot be compiled one by one; set rollout.compile=false."
            )
        self._cache = cache
        self._compiled = torch.compile(_forward, dynamic=True)
        # dimensions that are equal by chance may differ later
        self._sizes = symbols.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        self._floats = dynamo.patch(specialize_float=True)  # floats are the model's constants

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Run calls of the layers compiled within the block; the modules, which the trainer shares, stay unchanged."""
        try:
            for layer, number in self._layers:
                layer._compiled_call_impl = partial(self._call, layer, number)
            with self._sizes, self._floats:
                yield
        finally:
            for layer, _ in self._layers:
                layer._compiled_call_impl = None

    def _call(self, layer: nn.Module, number: int, *args: Any, **kwargs: Any) -> Any:
        kwargs["kv_store"] = self._cache.layer(number)
        return self._compiled(layer, *args, **kwargs)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)  # as `nn.Module.compile` does: with the layer's hooks


def layer_number(layer: nn.Module) -> int | None:
    """Return the layer index under which the layer's attention looks up its KV pages, or None."""
    return next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)  # type: ignore[return-value]


class Decoded(NamedTuple):
    """Results of all rows of a step, followed by those of the padding; valid until the next step."""

    vector: StepVector
    logits: Tensor  # [rows, V] fp32
    drawn: DeviceSamples


class DecodeGraphs:
    """CUDA graphs by size, captured when a step first needs them.

    Args:
        forward: computes the logits [N, V] of all rows of a step.
        never: [K] int64, see `draw`.
        window: most steps that are replayed before the host looks (`Windows`).
        places: returns the addresses of the weights and the pages.
    """

    def __init__(
        self,
        cache: KvCache,
        forward: Callable[[StepVector], Tensor],
        device: torch.device,
        never: Tensor | None = None,
        window: int = 1,
        places: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self._places_now = places
        self._never = never
        self._window = window
        self._cache = cache
        self._forward = forward
        self._device = device
        self._graphs: dict[tuple[int, int, bool, tuple[str, ...]], tuple[torch.cuda.CUDAGraph, Decoded]] = {}
        self._pool: Any = None  # memory that all graphs share, as one runs at a time
        self._places: tuple[int, ...] = ()  # of all that the graphs read, when the first was captured

    def decode(self, step: Step, draws: Draws, adapter: Array | None) -> Decoded:
        """Run the steps of a window that only decodes: each of its rows is sampled once a step; ``adapter`` is as in
        `StepVector.load`."""
        rows = _bucket(len(step.input_ids), LEAST_ROWS)
        partials = _bucket(count_partials(step, self._device), LEAST_PARTIALS)
        kind = rows, partials, adapter is not None, draws.filters
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(self.pad(step, draws, rows, partials, adapter), draws)
        graph, decoded = self._graphs[kind]
        decoded.vector.load(step, draws, self._cache.spare_slot, adapter)
        for _ in range(step.steps):
            graph.replay()
        return decoded

    def run(self, vector: StepVector, filters: tuple[str, ...]) -> Decoded:
        """Run a step without a graph."""
        logits = self._forward(vector)
        out = draw(logits, vector.draws, filters, self._never)
        return Decoded(vector, logits, device_samples(out) if self._window == 1 else vector.advance(out))

    def pad(self, step: Step, draws: Draws, rows: int, partials: int, adapter: Array | None) -> StepVector:
        """Return the step padded to ``rows`` rows and ``partials`` partial results."""
        pages = 2 * self._cache.tree.num_pages  # a page has at most two nodes' keys
        vector = StepVector(
            rows,
            partials,
            pages,
            self._cache.groups,
            self._device,
            samples=rows,
            rotary=step.rotary is not None,
            adapted=adapter is not None,
            window=self._window,
        )
        vector.load(step, draws, self._cache.spare_slot, adapter)
        return vector

    def clear(self) -> None:
        """Drop all graphs, because the weights, the adapters or the pages have moved."""
        self._graphs.clear()
        self._pool = None  # torch refuses captures into a pool whose graphs are all gone

    def forget_moved(self) -> None:
        """Drop all graphs if an address that they read has changed."""
        if self._graphs and self._places != self._places_now():
            self.clear()

    def _capture(self, vector: StepVector, draws: Draws) -> tuple[torch.cuda.CUDAGraph, Decoded]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compile kernels and initialise libraries before anything is recorded
            self.run(vector, draws.filters)
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool, self._places = torch.cuda.graph_pool_handle(), self._places_now()
        graph = torch.cuda.CUDAGraph()
        # a trainer in another thread may allocate during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            decoded = self.run(vector, draws.filters)
        return graph, decoded


def _bucket(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
