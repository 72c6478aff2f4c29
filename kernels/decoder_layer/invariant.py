"""Backend ``invariant``: the decoder of `triton`, whose sums have the order that training has.

Products are those of `kernels/linear`: of weights whose depth has one part side by side, of others each by itself.
Where few rows are multiplied with a narrow deep weight, the norm that follows adds the parts of its depth. Attention is
that of `kernels/tree_decode/invariant.py`; the slots of its keys are found once for all layers. Passes that sum along a
row alone are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..linear.several import aligned, several
from ..linear.tiles import order_of
from ..linear.triton import linear, unadded
from ..tree_decode.invariant import located, tree_decode
from ..tree_decode.schedule import Nodes, Work
from . import triton
from .weights import Adapted, DecoderParts


def decoder(
    model: DecoderParts,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: Nodes,
    work: Work,
    adapted: Adapted | None,
) -> Tensor:  # [N, H]
    """Like `reference.decoder`; float32 or bfloat16."""
    first = model.layers[0]
    every = located(nodes, work, len(first.q) // len(first.k), model.pages[0][0].shape[1])

    def attend(q: Tensor, pages: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        return tree_decode(q, *pages, nodes, every, model.scale, window, None)[0]

    passes = triton.Passes(attend, side_by_side, linear, to_be_added)
    return triton.computed(model, input_ids, cos, sin, turns, slots, adapted, passes)


def side_by_side(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Return the products of rows [M, K] with several weights [N, K], side by side, each as `linear` sums it."""
    one_part = all(order_of(len(weight), weight.shape[1], x.dtype).parts == 1 for weight in weights)
    if one_part and aligned(*weights, *biases):
        return several(x, weights, biases)
    alone = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return torch.cat(alone, 1)


def to_be_added(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product as `triton.add_rms_norm` takes it: a bias is added after the parts."""
    return unadded(x, weight) if bias is None else linear(x, weight, bias)
