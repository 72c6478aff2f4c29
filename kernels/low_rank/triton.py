"""Triton backend: two products a tile of rows that have the same adapter.

    inner  a tile and a block of ranks: x a^T over the whole depth, written in the dtype of x
    outer  a tile and a block of columns: inner b^T, scaled, added to out

The addresses of an adapter's matrices are read from the table, so adapters stay where they are and may have different
ranks. The tiles are read from the device: a launch serves any runs, and can be captured in a CUDA graph, where tiles
without rows end at once. Every sum is made by one program in a fixed order, so a row's bits do not depend on the other
rows. Bound by the reading of a, b and out: each is read once a tile.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import machine
from .adapters import Adapters
from .runs import TILE, Runs, tiles_of

RANKS, DEPTH = 16, 64  # of a step of the inner product
COLUMNS = 64  # of a program of the outer one


@triton.jit
def inner_kernel(
    x,  # [N, K]
    matrices,  # [G, 3] int64
    tiles,  # [T, 3] int32
    inner,  # [N, most_rank]
    K,
    most_rank,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    begin, end, number = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(matrices + 3 * number + 2)
    at = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if begin < end and tl.program_id(1) * RANKS < rank:
        a = tl.load(matrices + 3 * number).to(tl.pointer_type(x.dtype.element_ty))
        row = (begin + tl.arange(0, TILE)).to(tl.int64)
        inside = row < end
        acc = tl.zeros([TILE, RANKS], tl.float32)
        for k in range(0, K, DEPTH):
            depth = k + tl.arange(0, DEPTH)
            within = (depth < K)[None, :]
            rows = tl.load(x + row[:, None] * K + depth[None, :], mask=inside[:, None] & within, other=0.0)
            of_a = tl.load(a + at[:, None] * K + depth[None, :], mask=(at < rank)[:, None] & within, other=0.0)
            acc = tl.dot(rows, of_a.T, acc, input_precision="ieee")
        to = inner + row[:, None] * most_rank + at[None, :]
        tl.store(to, acc.to(inner.dtype.element_ty), mask=inside[:, None] & (at < rank)[None, :])


@triton.jit
def outer_kernel(
    inner,  # [N, most_rank]
    matrices,  # [G, 3] int64
    scales,  # [G] fp32
    tiles,  # [T, 3] int32
    out,  # [N, M]
    M,
    most_rank,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    begin, end, number = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rank = tl.load(matrices + 3 * number + 2)
    if begin < end and rank > 0:
        dtype: tl.constexpr = out.dtype.element_ty
        b = tl.load(matrices + 3 * number + 1).to(tl.pointer_type(dtype))
        row = (begin + tl.arange(0, TILE)).to(tl.int64)
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        inside, exists = row < end, column < M
        acc = tl.zeros([TILE, COLUMNS], tl.float32)
        for r in range(0, rank, RANKS):
            at = r + tl.arange(0, RANKS)
            within = (at < rank)[None, :]
            low = tl.load(inner + row[:, None] * most_rank + at[None, :], mask=inside[:, None] & within, other=0.0)
            of_b = tl.load(b + column[:, None] * rank + at[None, :], mask=exists[:, None] & within, other=0.0)
            acc = tl.dot(low, of_b.T, acc, input_precision="ieee")
        scaled = (acc.to(dtype).to(tl.float32) * tl.load(scales + number)).to(dtype).to(tl.float32)
        to, here = out + row[:, None] * M + column[None, :], inside[:, None] & exists[None, :]
        tl.store(to, (tl.load(to, mask=here, other=0.0).to(tl.float32) + scaled).to(dtype), mask=here)


def add_low_rank(out: Tensor, x: Tensor, adapters: Adapters, runs: Runs) -> None:  # [N, M], [N, K]
    """Like `reference.add_low_rank`; float32, bfloat16 or float16."""
    width, depth = adapters.shape
    if machine.interpreting() and x.dtype == torch.bfloat16:  # the interpreter multiplies bit patterns of bf16 operands
        wide, weight = out.float(), out.new_empty((width, depth), dtype=torch.float32)
        add_low_rank(wide, x.float(), Adapters(adapters.of, weight), runs)
        out.copy_(wide)
        return
    tiles = torch.from_numpy(tiles_of(runs)).to(out.device) if runs.tiles is None else runs.tiles
    inner = x.new_empty((len(x), adapters.most_rank))
    table, sizes = adapters.matrices, {"TILE": TILE, "RANKS": RANKS, "enable_fp_fusion": False}
    grid = len(tiles), triton.cdiv(adapters.most_rank, RANKS)
    inner_kernel[grid](x, table, tiles, inner, depth, adapters.most_rank, DEPTH=DEPTH, **sizes)
    grid = len(tiles), triton.cdiv(width, COLUMNS)
    outer_kernel[grid](inner, table, adapters.scales, tiles, out, width, adapters.most_rank, COLUMNS=COLUMNS, **sizes)
