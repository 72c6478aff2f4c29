"""Device functions that the Triton kernels of sampling share: a row's blocks, weights and parameters."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
TINY = tl.constexpr(1.1754943508222875e-38)
NOTHING = tl.constexpr(
    -127.0
)  # log2 of a weight that cannot be drawn: its E / w is above 2^93, the best one's below 2^5
MAX_INDEX = tl.constexpr(0x7FFFFFFF)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def load_block(row, begin, vocab, BLOCK: tl.constexpr):
    index = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= vocab:  # without a mask, 16 bytes at a time
        x = tl.load(row + index)
    else:
        x = tl.load(row + index, mask=index < vocab, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def columns(x, WIDTH: tl.constexpr):
    """Return the first of each WIDTH neighbours of x, the second of each, and so on, in the threads that hold them."""
    MANY: tl.constexpr = x.shape[0] // WIDTH
    even, odd = tl.split(tl.reshape(x, (MANY, WIDTH // 2, 2)))
    if WIDTH == 8:
        even, even2 = tl.split(tl.reshape(even, (MANY, 2, 2)))
        odd, odd2 = tl.split(tl.reshape(odd, (MANY, 2, 2)))
        x2, x6 = tl.split(even2)
        x3, x7 = tl.split(odd2)
        x0, x4 = tl.split(even)
        x1, x5 = tl.split(odd)
        parts = x0, x1, x2, x3, x4, x5, x6, x7
    else:
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        parts = x0, x1, x2, x3  # type: ignore[assignment]
    return parts


@triton.jit
def load_blocks(values, n, blocks, other, BLOCKS: tl.constexpr):
    """Load the results of the blocks of row n."""
    b = tl.arange(0, BLOCKS)
    return tl.load(values + n * blocks + b, mask=b < blocks, other=other)


@triton.jit
def scale_of(temperature):
    """Return whether a temperature means greedy, and log2(e) divided by it: weights are powers of two."""
    greedy = temperature < TINY
    return greedy, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)) * LOG2E


@triton.jit
def log2_weights(x, best, scale):
    return tl.maximum((x - best) * scale, NOTHING)


@triton.jit
def rescale(tops, top, scale):
    """Return what is added to the log2 of a block's weights to make them weights of the row, and its power of two."""
    d = log2_weights(tops, top, scale)
    return d, tl.exp2(d)


@triton.jit
def is_valid(n, top, temperature, top_p, min_p):
    valid = (top > -INFINITY) & (top < INFINITY) & (temperature >= 0) & (temperature < INFINITY)
    if top_p is not None:
        valid &= tl.load(top_p + n) >= 0
    if min_p is not None:
        valid &= tl.load(min_p + n) >= 0
    return valid


@triton.jit
def is_filtered(n, top_k, top_p, min_p, vocab):
    """Return whether a filter of row n may leave out a token."""
    filtered = n < 0
    if top_k is not None:
        k = tl.load(top_k + n)
        filtered |= (k >= 1) & (k < vocab)
    if top_p is not None:
        filtered |= tl.load(top_p + n) < 1.0
    if min_p is not None:
        filtered |= tl.load(min_p + n) > 0.0
    return filtered


@triton.jit
def floor_of(n, min_p):
    """Return the least weight that min_p keeps; the best token, of weight 1, is always kept."""
    floor = 0.0
    if min_p is not None:
        floor = tl.minimum(tl.load(min_p + n), 1.0)
    return floor


@triton.jit
def is_kept(x, w, index, floor, cut, cut_index):
    """Return which tokens min_p and the cut of top-k and top-p keep."""
    return ((x > cut) | ((x == cut) & (index <= cut_index))) & (w >= floor)
