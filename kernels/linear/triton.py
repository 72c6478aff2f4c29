"""Triton backend: products whose order of sums depends on the weight alone.

A program computes ROWS rows, of which those that are missing are zeros, by COLUMNS columns, and sums along the depth:
blocks of DEPTH numbers in order, on one accumulator for each part of the depth (`tiles.Order`). Parts are added in
their order, by the program that computes all of them, or by a kernel that follows programs of one part each. No program
adds to what another has computed. Then the bias is added. So a row's bits do not depend on the number of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from .. import machine
from .cancelling import cancelling
from .tiles import Order, Tile, order_of, tiles_for

_log = logging.getLogger("rolltree.kernels")

GROUP = 8  # tiles of rows whose programs follow each other, so that they find a weight's columns in the cache
ADDED = 1024  # numbers that a program of add_kernel takes


@triton.jit
def place_of(M, across, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return the rows of a program and its tile of columns, of which there are ``across``."""
    first = tl.program_id(0) // (GROUP * across) * GROUP
    together = tl.minimum(tl.cdiv(M, ROWS) - first, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    return (first + place % together) * ROWS + tl.arange(0, ROWS), place // together


@triton.jit
def sums_of(
    x, weight, row, column, M, N, K, begin, end,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums along the depth from ``begin`` to ``end`` of a tile, [ROWS, COLUMNS]; EVEN: in whole blocks."""
    k = tl.arange(0, DEPTH)
    x_tile = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_tile = weight + column.to(tl.int64)[:, None] * K + k[None, :]
    has_row, has_column = (row < M)[:, None], (column < N)[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(begin, end, DEPTH):
        if EVEN:
            left = tl.load(x_tile + at, mask=has_row, other=0.0)
            right = tl.load(weight_tile + at, mask=has_column, other=0.0)
        else:
            inside = (at + k < K)[None, :]
            left = tl.load(x_tile + at, mask=has_row & inside, other=0.0)
            right = tl.load(weight_tile + at, mask=has_column & inside, other=0.0)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    return acc


@triton.jit
def all_sums_of(
    x, weight, row, column, M, N, K, part,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums of parts of ``part`` numbers each, added in their order."""
    total = sums_of(x, weight, row, column, M, N, K, 0, tl.minimum(part, K), EVEN, ROWS, COLUMNS, DEPTH)
    for begin in range(part, K, part):
        end = tl.minimum(begin + part, K)
        total += sums_of(x, weight, row, column, M, N, K, begin, end, EVEN, ROWS, COLUMNS, DEPTH)
    return total


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]; read with HAS_BIAS only
    out,  # [M, N], rows at any stride; with APART [parts, M, N] fp32
    M, N, K, out_stride, part,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, tile = place_of(M, tl.cdiv(N, COLUMNS), ROWS, GROUP)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    if APART:
        begin = tl.program_id(1) * part
        end = tl.minimum(begin + part, K)
        acc = sums_of(x, weight, row, column, M, N, K, begin, end, EVEN, ROWS, COLUMNS, DEPTH)
        out += tl.program_id(1).to(tl.int64) * M * out_stride
    elif PARTS > 1:
        acc = all_sums_of(x, weight, row, column, M, N, K, part, EVEN, ROWS, COLUMNS, DEPTH)
    else:
        acc = sums_of(x, weight, row, column, M, N, K, 0, K, EVEN, ROWS, COLUMNS, DEPTH)
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def add_kernel(
    sums,  # [PARTS, M, N] fp32
    bias,  # [N]; read with HAS_BIAS only
    out,  # [M, N], rows at any stride
    M, N, out_stride,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = M.to(tl.int64) * N
    total = tl.load(sums + at, mask=at < count, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * count + at, mask=at < count, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at // N * out_stride + at % N, total.to(out.dtype.element_ty), mask=at < count)


def part_of(order: Order, depth: int) -> int:
    """Return the numbers of a part of the depth: whole blocks, fewer in the last."""
    return max(1, triton.cdiv(triton.cdiv(depth, order.block), order.parts)) * order.block


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
    width, depth = weight.shape
    order = order_of(width, depth, x.dtype)
    return _launch(x, weight, bias, out, order, tile_of(order, width, depth, x.dtype, len(x), x.device))


def unadded(x: Tensor, weight: Tensor) -> Tensor:  # [M, K], [N, K]
    """Return ``x weight^T`` [M, N] in their dtype, or the fp32 sums of the parts of its depth [parts, M, N] where these
    are computed apart: added in their order and rounded they are the product."""
    width, depth = weight.shape
    order = order_of(width, depth, x.dtype)
    tile = tile_of(order, width, depth, x.dtype, len(x), x.device)
    if not tile.apart:
        return linear(x, weight, None)
    sums = x.new_empty((order.parts, len(x), width), dtype=torch.float32)
    return _launch_sums(x, weight, None, sums, order, tile) if sums.numel() else sums


def by_tile(x: Tensor, weight: Tensor, order: Order, tile: Tile) -> Tensor:  # [M, K], [N, K] -> [M, N] fp32
    """Return ``x weight^T`` by the kernels of one tile."""
    return _launch(x, weight, None, x.new_empty((len(x), len(weight)), dtype=torch.float32), order, tile)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, order: Order, tile: Tile) -> Tensor:
    if not out.numel():
        return out
    if not tile.apart:
        return _launch_sums(x, weight, bias, out, order, tile)
    rows, width = out.shape
    sums = out.new_empty((order.parts, rows, width), dtype=torch.float32)
    _launch_sums(x, weight, None, sums, order, tile)
    add_kernel[(triton.cdiv(rows * width, ADDED),)](
        sums, out if bias is None else bias, out, rows, width, out.stride(0),
        HAS_BIAS=bias is not None, PARTS=order.parts, BLOCK=ADDED, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _launch_sums(x: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, order: Order, tile: Tile) -> Tensor:
    """Fill ``sums`` with the product and a bias, or with the sums of the parts of the depth if they are apart."""
    if machine.interpreting() and x.dtype == torch.bfloat16:  # it multiplies bit patterns
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    (rows, depth), width = x.shape, len(weight)
    grid = triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns), order.parts if tile.apart else 1
    linear_kernel[grid](
        x, weight, sums if bias is None else bias, sums, rows, width, depth, sums.stride(-2), part_of(order, depth),
        HAS_BIAS=bias is not None, EVEN=depth % order.block == 0, PARTS=order.parts, APART=tile.apart,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=order.block, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return sums


def tile_of(order: Order, width: int, depth: int, dtype: torch.dtype, rows: int, device: torch.device) -> Tile:
    """Return the tile for ``rows`` rows: that whose programs, in rounds of one a processor, read the least. Few rows
    take the smallest."""
    tiles, processors = agreeing(order, depth, dtype, device), machine.gpu_processors(device)

    def read(tile: Tile) -> float:
        parts = order.parts if tile.apart else 1
        programs = -(-rows // tile.rows) * -(-width // tile.columns) * parts
        return -(-programs // processors) * (tile.rows + tile.columns) / parts

    return tiles[0] if rows <= tiles[0].rows else min(tiles, key=read)


@functools.cache
def agreeing(order: Order, depth: int, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """Return the tiles whose sums have the same bits on this device; others are named in the log, and not used.

    They are compared on sums whose terms cancel, for more rows and columns than any tile has, once a depth, and not
    for the first time within a CUDA graph that is being captured. A tile that needs more shared memory than the device
    has is left out likewise.
    """
    first, *others = tiles_for(order, dtype, depth)
    if not others:
        return (first,)
    rows, weight, _ = cancelling(300, 300, depth, dtype, device)
    expected, kept = by_tile(rows, weight, order, first), [first]
    for tile in others:
        try:
            reason = (
                "" if torch.equal(by_tile(rows, weight, order, tile), expected) else f"its bits differ from {first}"
            )
        except OutOfResources as error:
            reason = str(error)
        if reason:
            _log.warning("linear: %s of depth %d is not used on %s: %s.", tile, depth, device, reason)
        else:
            kept.append(tile)
    return tuple(kept)
