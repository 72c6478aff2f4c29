"""What the Triton kernels do with a tile: load it, score it, mask it, store it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """tanh with a small relative error near 0 too."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    small = p * z * x + x
    magnitude = tl.minimum(tl.abs(x), 10.0)
    large = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def log2_scores(dot, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in the log2 domain, and the slope of the softcap there (1 without)."""
    if HAS_SOFTCAP:
        bent = _tanh(dot * (scale / softcap))
        return bent * (softcap * LOG2E), 1.0 - bent * bent
    else:
        return dot * (scale * LOG2E), 1.0


@triton.jit
def hide(
    scores, rows, keys, end, row_position, key_position, window, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """-inf where broadcast rows do not see keys."""
    seen = (keys <= rows) & (rows < end)
    if HAS_WINDOW:
        seen &= row_position - key_position < window
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def wide_product(a, b):
    """In 64 bits, of numbers below 2^31 that are not negative."""
    if b.dtype == tl.int64:
        return a.to(tl.int64) * b
    else:
        return (tl.umulhi(a, b).to(tl.int64) << 32) + (a * b).to(tl.uint32).to(tl.int64)


@triton.jit
def load_tile(
    pointer, first, stride, limit, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    LEAN: tl.constexpr = False,
):  # fmt: skip
    """Rows from ``first`` on of a [*, DIM] head as [SIZE, WIDTH], zeros outside; WHOLE: all are below ``limit``.

    LEAN: in a loop it takes some more instructions instead of two registers for each 16 bytes that a thread copies,
    which hold the distance of their row from ``first``, and of one for the upper half of ``stride``.
    """
    lines, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    if LEAN:
        pointers = pointer + wide_product(first + lines, stride + tl.zeros([], tl.int32))[:, None] + columns[None, :]
    else:
        pointers = pointer + first.to(tl.int64) * stride + (lines[:, None] * stride + columns[None, :])
    if WHOLE and DIM == WIDTH:
        return tl.load(pointers)
    elif WHOLE:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    elif DIM == WIDTH:
        return tl.load(pointers, mask=(first + lines < limit)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(first + lines < limit)[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    pointer, first, stride, limit, value, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    lines, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    pointers = pointer + first.to(tl.int64) * stride + (lines[:, None] * stride + columns[None, :])
    mask = (first + lines < limit)[:, None] & (columns < DIM)[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=mask)
