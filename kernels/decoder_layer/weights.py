"""The weights of layers of the Llama family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import Arguments
from ..low_rank import Adapters, Runs

PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
"""The products of a layer that may have adapters."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
"""The dtypes of weights and rows; float64 runs on the reference, for checks."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights of a layer of the Llama family; of one dtype, contiguous.

    H is the width of the residual, D that of a head, F that of the gated unit.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit, or a weight that is not contiguous.
    """

    input_norm: Tensor  # [H]
    q: Tensor  # [Hq D, H]
    q_bias: Tensor | None  # [Hq D]
    k: Tensor  # [Hkv D, H]
    k_bias: Tensor | None  # [Hkv D]
    v: Tensor  # [Hkv D, H]
    v_bias: Tensor | None  # [Hkv D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Tensor  # [H, Hq D]
    o_bias: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]

    def __post_init__(self) -> None:
        check = Arguments("LayerWeights", "input_norm", self.input_norm)
        (H,) = check.floats("input_norm", self.input_norm, ("H",), dtypes=DTYPES).shape
        same = (self.input_norm.dtype,)
        queries, keys = (len(check.floats(name, t, ("*", H), "", same)) for name, t in (("q", self.q), ("k", self.k)))
        wide = len(check.floats("gate", self.gate, ("F", H), "", same))
        shapes: dict[str, tuple[int | str, ...]] = {
            "v": (keys, H),
            "o": (H, queries),
            "mlp_norm": (H,),
            "up": (wide, H),
            "down": (H, wide),
            "q_bias": (queries,),
            "k_bias": (keys,),
            "v_bias": (keys,),
            "o_bias": (H,),
            "q_norm": ("D",),
            "k_norm": ("D",),
        }
        for name, shape in shapes.items():
            if (tensor := getattr(self, name)) is not None or not name.endswith(("_bias", "q_norm", "k_norm")):
                check.floats(name, tensor, shape, " like input_norm", same)
        check_contiguous(check, {name: tensor for name, tensor in vars(self).items() if tensor is not None})

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())

    def does_not_fit(self, H: int, heads: int, D: int, rows: Tensor) -> str | None:
        """Return why these weights do not fit rows like ``rows`` of width H and pages of ``heads`` heads of D, or
        None."""
        if self.q.shape[1] != H or self.q.dtype != rows.dtype or self.q.device != rows.device:
            return f"layers must take rows of {H} {rows.dtype} numbers on {rows.device} like the embedding's"
        queries, keys = len(self.q), len(self.k)
        if keys != heads * D or queries % keys:
            expected = f"keys of {heads} x {D} numbers and a multiple for queries"
            return f"layers must produce {expected}, not {keys} and {queries}"
        if any(norm is not None and len(norm) != D for norm in (self.q_norm, self.k_norm)):
            return f"norms of heads must have {D} numbers"
        return None


class DecoderAdapters:
    """The adapters of the products of all layers, by number.

    Args:
        layers: those of `PRODUCTS`, in this order, of each layer; all have as many.
    """

    def __init__(self, layers: Sequence[Sequence[Adapters]]) -> None:
        self.layers = tuple(tuple(layer) for layer in layers)
        self.matrices, self.scales = (
            torch.stack([getattr(adapters, name) for layer in layers for adapters in layer])
            for name in ("matrices", "scales")
        )
        """[layers * 7, G, 3] int64 and [layers * 7, G] float32, as those of `Adapters`."""

    def does_not_fit(self, layers: Sequence[LayerWeights]) -> str | None:
        """Return why these adapters are not of the products of ``layers``, or None."""
        weights = [[getattr(layer, name) for name in PRODUCTS] for layer in layers]
        for n, (of_layer, of_weights) in enumerate(zip(self.layers, weights, strict=False)):
            for name, adapters, weight in zip(PRODUCTS, of_layer, of_weights, strict=False):
                if adapters.shape != weight.shape or (adapters.dtype, adapters.device) != (weight.dtype, weight.device):
                    return f"the adapters of {name} in layer {n} are of another shape, dtype or device than its weight"
        if [len(of_layer) for of_layer in self.layers] != [len(PRODUCTS)] * len(weights):
            return f"adapters must be of {len(PRODUCTS)} products of {len(weights)} layers"
        return None


class Adapted(NamedTuple):
    """The adapters of a decoder, and the rows of a step that have them."""

    adapters: DecoderAdapters
    runs: Runs


def check_contiguous(check: Arguments, arguments: Mapping[str, Tensor]) -> None:
    for name, tensor in arguments.items():
        if not tensor.is_contiguous():
            check.require(False, f"{name} must be contiguous, got strides {list(tensor.stride())}")


class DecoderParts(Protocol):
    """The parts of a `Decoder` that `reference.decoder` reads."""

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    pages: tuple[tuple[Tensor, Tensor], ...]  # [P, page, Hkv, D]
    windows: tuple[int | None, ...]
    eps: float
    scale: float
