"""Triton backend: products whose tiles depend on the weight alone.

A program computes ROWS rows, of which those that are missing are zeros, by COLUMNS columns, and sums along the whole
depth: blocks of DEPTH numbers in order, on one accumulator, to which the bias is added. No program adds to what another
has computed, and one compiled kernel serves any number of rows, so a row's bits do not depend on it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import machine

GROUP = 8  # tiles of rows whose programs follow each other, so that they find a weight's columns in the cache


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_of(width: int, depth: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a weight ``[width, depth]``: a narrow one has narrow tiles, so that they are enough for a GPU
    where few rows are multiplied. Rows of an odd depth are not aligned for copies to shared memory."""
    block = max(16, triton.next_power_of_2(depth))
    if dtype == torch.float32:
        return Tile(64, 64, 16, 4, 3)
    if depth % 8:
        return Tile(64, 64, min(32, block), 4, 2)
    if width < 8192:
        return Tile(128, 64, min(64, block), 4, 4)
    return Tile(128, 128, min(64, block), 8, 4)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]; read with HAS_BIAS only
    out,  # [M, N]
    M, N, K, out_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(N, COLUMNS)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    together = tl.minimum(tl.cdiv(M, ROWS) - first, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    row = (first + place % together) * ROWS + tl.arange(0, ROWS)
    column = place // together * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_tile = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_tile = weight + column.to(tl.int64)[:, None] * K + k[None, :]
    has_row, has_column = (row < M)[:, None], (column < N)[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, K, DEPTH):
        if EVEN:
            left = tl.load(x_tile + begin, mask=has_row, other=0.0)
            right = tl.load(weight_tile + begin, mask=has_column, other=0.0)
        else:
            inside = (begin + k < K)[None, :]
            left = tl.load(x_tile + begin, mask=has_row & inside, other=0.0)
            right = tl.load(weight_tile + begin, mask=has_column & inside, other=0.0)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=has_row & (column < N)[None, :])


def linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
) -> Tensor:  # [M, N]
    """Return ``x weight^T + bias``; all contiguous, float32 or bfloat16."""
    out = x.new_empty(len(x), len(weight))
    if machine.interpreting() and x.dtype == torch.bfloat16:  # it truncates results
        return out.copy_(product(x, weight, bias, out.float()))
    return product(x, weight, bias, out)


def product(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N]
) -> Tensor:
    """Fill ``out`` with ``x weight^T + bias`` and return it: float32 or bfloat16, rows at any stride; the others are
    contiguous."""
    tile = tile_of(len(weight), weight.shape[1], x.dtype)
    if machine.interpreting() and x.dtype == torch.bfloat16:  # it multiplies bit patterns
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    (rows, depth), width = x.shape, len(weight)
    if not out.numel():
        return out
    linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns),)](
        x, weight, out if bias is None else bias, out, rows, width, depth, out.stride(0),
        HAS_BIAS=bias is not None, EVEN=depth % tile.depth == 0,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out
