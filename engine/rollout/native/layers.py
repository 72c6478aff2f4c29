"""Decoder layers, compiled once for all of them.

The layers of a decoder are one program on different weights and pages. What a compiled program is tied to is what it
was traced on as a constant: so a layer gets the pages it writes and reads as tensors (`LayerPages`) and its number is
never looked at. Kinds of layers (a sliding window and none) are as many programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch.fx.experimental import _config as symbols
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import UserError
from .kv_cache import KvCache


class CompiledLayers:
    """The layers of a decoder, which `substituted` lets run compiled.

    Raises:
        UserError: the decoder has no layers that are known by Transformers' class of them.
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
        # sizes that are equal by chance need not stay so
        self._sizes = symbols.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        self._floats = dynamo.patch(specialize_float=True)  # they are the model's constants

    @contextmanager
    def substituted(self) -> Iterator[None]:
        """Meanwhile calls of the layers run compiled; the modules are also the trainer's, and remain as they were."""
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
    """By which its attention asks for pages."""
    return next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)  # type: ignore[return-value]
