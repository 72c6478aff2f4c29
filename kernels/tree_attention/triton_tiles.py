"""Device functions on a tile: load it, score it, mask it, store it."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


EXACT = tl.constexpr(2.0**28)
"""Above it two different scores are 16 apart in the log2 domain, and half a unit in the last place is more than 8."""


@triton.jit
def power_of_two(x):
    """Return the smallest power of two that is not below a positive number."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(scores, factor):
    """Return what scores of this size are multiplied by: ``factor``, or the power of two above it.

    ``scores * factor - top`` is one multiply-add, which does not round the product, while ``top``, the product of the
    largest score, is rounded: the largest probability is two to the power of that rounding. Above `EXACT` it would
    overflow. There a product by a power of two is exact, and every score but the largest is too far below to count.
    """
    return tl.where(tl.abs(scores * factor) > EXACT, power_of_two(factor), factor)


@triton.jit
def tanh(x):
    """Return tanh with a small relative error near 0 too."""
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
    """Return scores in the log2 domain, and the slope of the softcap there (1 without)."""
    if HAS_SOFTCAP:
        bent = tanh(dot * (scale / softcap))
        return bent * (softcap * LOG2E), 1.0 - bent * bent
    else:
        return dot * (scale * LOG2E), 1.0


@triton.jit
def hide(
    scores, rows, keys, end, row_position, key_position, window, HAS_WINDOW: tl.constexpr
):  # fmt: skip
    """Return the scores with -inf where broadcast rows do not see keys."""
    seen = (keys <= rows) & (rows < end)
    if HAS_WINDOW:
        seen &= row_position - key_position < window
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def wide_product(a, b):
    """Return a product in 64 bits, of numbers below 2^31 that are not negative: one instruction; 64-bit factors take
    three."""
    b += tl.zeros([], tl.int32)  # a stride of 1 comes as a constant
    if b.dtype == tl.int64:
        return a.to(tl.int64) * b
    else:
        return a.to(tl.uint32).to(tl.int64) * b.to(tl.uint32).to(tl.int64)


@triton.jit
def load_tile(
    pointer, first, stride, limit, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    LEAN: tl.constexpr = False,
):  # fmt: skip
    """Load rows from ``first`` on of a [*, DIM] head as [SIZE, WIDTH], zeros outside; WHOLE: all are below ``limit``.

    LEAN is for loops without a register to spare: a thread of 256 that copies 16 bytes of 128 columns has rows 16
    apart. Their distances are the same for all threads, so what remains needs one register, as it is known to be
    positive. Elements have two bytes, and where DIM is a multiple of 8 every row begins at a multiple of 16.
    """
    lines, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    if LEAN:
        near = (tl.arange(0, 16) * stride)[None, :, None] + columns[None, None, :]
        if near.dtype == tl.int32:
            near &= 0x7FFFFFFF
        far = wide_product(16 * tl.arange(0, SIZE // 16), stride)[:, None, None]
        pointers = tl.reshape((pointer + wide_product(first, stride) + far) + near, (SIZE, WIDTH))
        BYTES: tl.constexpr = 16 if DIM % 8 == 0 else 2
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, BYTES)), (1, WIDTH))
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
def load_lines(pointer, LINES: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr):
    """Load [LINES, SIZE]: in each line the SIZE numbers of four bytes at ``pointer``.

    Triton copies a vector with fewer elements than threads one element a thread, or all of it by every thread. So it is
    loaded several times at once, 16 bytes to each of 256 threads, and the 16 lines of a warp read separate copies;
    lines 8 apart, which one thread holds, share one. Needs ROOM for 4 KiB a stage in shared memory.
    """
    if not ROOM:
        return tl.broadcast_to(tl.load(pointer + tl.arange(0, SIZE))[None, :], (LINES, SIZE))
    COPIES: tl.constexpr = min(LINES, 1024 // SIZE)
    WARPS: tl.constexpr = max(1, LINES // 16)
    copies = tl.load(pointer + tl.zeros([COPIES, 1], tl.int32) + tl.arange(0, SIZE)[None, :])
    copies = tl.reshape(copies, (WARPS, 1, COPIES // WARPS, SIZE))
    return tl.reshape(tl.broadcast_to(copies, (WARPS, LINES // COPIES, COPIES // WARPS, SIZE)), (LINES, SIZE))


@triton.jit
def store_tile(
    pointer, first, stride, limit, value, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    lines, columns = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    pointers = pointer + first.to(tl.int64) * stride + (lines[:, None] * stride + columns[None, :])
    mask = (first + lines < limit)[:, None] & (columns < DIM)[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=mask)
