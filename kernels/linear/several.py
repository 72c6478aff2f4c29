"""Triton backend of the products of the same rows with two or three weights, in one launch.

A program computes a tile of one weight: the whole depth in order, on one accumulator. So the numbers are those of
`triton.linear` for weights whose sums have one part (`tiles.order_of`). Weights stay where they are; the results lie
side by side in a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .. import machine
from .tiles import order_of
from .triton import GROUP, place_of, sums_of, tile_of


@triton.jit(do_not_specialize=["M"])
def several_kernel(
    x,  # [M, K]
    weight0,  # [N0, K]
    weight1,  # [N1, K]
    weight2,  # [N2, K]
    bias0,  # [N0]; read with HAS_BIAS only, like the others
    bias1,  # [N1]
    bias2,  # [N2]
    out,  # [M, N0 + N1 + N2]
    M, K,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles0: tl.constexpr = (N0 + COLUMNS - 1) // COLUMNS
    tiles1: tl.constexpr = (N1 + COLUMNS - 1) // COLUMNS
    tiles2: tl.constexpr = (N2 + COLUMNS - 1) // COLUMNS
    across: tl.constexpr = tiles0 + tiles1 + tiles2
    row, tile = place_of(M, across, ROWS, GROUP)
    weight = weight0
    bias = bias0
    if tile >= tiles0:
        weight = weight1
        bias = bias1
    if tile >= tiles0 + tiles1:
        weight = weight2
        bias = bias2
    weight = tl.multiple_of(weight, 16)
    width = tl.where(tile < tiles0, N0, tl.where(tile < tiles0 + tiles1, N1, N2))
    before = tl.where(tile < tiles0, 0, tl.where(tile < tiles0 + tiles1, N0, N0 + N1))
    skipped = tl.where(tile < tiles0, 0, tl.where(tile < tiles0 + tiles1, tiles0, tiles0 + tiles1))
    column = (tile - skipped) * COLUMNS + tl.arange(0, COLUMNS)
    acc = sums_of(x, weight, row, column, M, width, K, 0, K, EVEN, ROWS, COLUMNS, DEPTH)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * (N0 + N1 + N2) + (before + column)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < width)[None, :])


def several(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Return the products of rows with two or three weights, side by side.

    Args:
        x: [M, K] float32 or bfloat16, contiguous.
        weights: [N, K] each, of the same dtype, contiguous.
        biases: [N] each, or None for all.

    Returns:
        [M, sum of the N], each sum in one part; those of the library where a weight does not begin at a
        multiple of 16 bytes, as a part of another tensor may.
    """
    if not aligned(*weights, *biases):
        return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=1)
    widths = [len(weight) for weight in weights]
    out = x.new_empty(len(x), sum(widths))
    if machine.interpreting() and x.dtype == torch.bfloat16:  # it multiplies bit patterns, and truncates results
        wide = [None if bias is None else bias.float() for bias in biases]
        return out.copy_(_launch(x.float(), [weight.float() for weight in weights], wide, out.float(), x.dtype))
    return _launch(x, weights, biases, out, x.dtype)


def aligned(*tensors: Tensor | None) -> bool:
    """Return whether the tensors begin where `several` can read them."""
    return not any(tensor.data_ptr() % 16 for tensor in tensors if tensor is not None)


def _launch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], out: Tensor, dtype: torch.dtype
) -> Tensor:
    widths = [*map(len, weights), 0][:3]
    rows, depth = x.shape
    order = order_of(sum(widths), depth, dtype)._replace(parts=1)
    tile = tile_of(order, sum(widths), depth, dtype, rows, x.device)
    if not out.numel():
        return out
    added = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    across = sum(triton.cdiv(width, tile.columns) for width in widths)
    several_kernel[(triton.cdiv(rows, tile.rows) * across,)](
        x, *[*weights, weights[-1]][:3], *[*added, added[-1]][:3], out, rows, depth,
        N0=widths[0], N1=widths[1], N2=widths[2], HAS_BIAS=biases[0] is not None, EVEN=depth % order.block == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=order.block, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
