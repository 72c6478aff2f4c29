"""Device functions of the recurrences' kernels: tiles of rows, and decays added up within a chunk."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(pointer, stride, count, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load [ROWS, WIDTH], zeros from row ``count`` and from column ``columns`` on."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + row * stride + column, mask=(row < count) & (column < columns), other=0.0)


@triton.jit
def store_tile(pointer, stride, count, columns, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    tl.store(
        pointer + row * stride + column, tile.to(pointer.dtype.element_ty), mask=(row < count) & (column < columns)
    )


@triton.jit
def load_rows(pointer, stride, count, ROWS: tl.constexpr):
    """Load one number of each row [ROWS], zeros from row ``count`` on."""
    row = tl.arange(0, ROWS)
    return tl.load(pointer + row * stride, mask=row < count, other=0.0)


@triton.jit
def decays(decay, at, count, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decays from a chunk's beginning to each row [CHUNK, 1], and to its end [1, 1]; ``at`` counts heads of
    rows."""
    total = tl.cumsum(load_rows(decay + at, HEADS, count, CHUNK), 0)[:, None]
    return total, _last(total, CHUNK)


@triton.jit
def channel_decays(
    decay, at, count, columns, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return the same of each channel [ROWS, WIDTH] and [1, WIDTH], from the first of ROWS rows on."""
    total = tl.cumsum(load_tile(decay + at * DIM, HEADS * DIM, count, columns, ROWS, WIDTH), 0)
    return total, _last(total, ROWS)


@triton.jit
def _last(total, ROWS: tl.constexpr):
    """Return the last row; the decay of rows that are absent is 0."""
    return tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == ROWS - 1, total, 0.0), 0)[None, :]


@triton.jit
def whole_decay(
    decay, at, count, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return the factor of each channel from a chunk's beginning to its end [WIDTH, 1]."""
    total = tl.sum(load_tile(decay + at * DIM, HEADS * DIM, count, DIM, CHUNK, WIDTH), 0)
    return tl.exp(total)[:, None]
