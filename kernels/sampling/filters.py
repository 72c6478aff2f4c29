"""Top-k, top-p and min-p of a row by its candidates: a few strips of tokens that hold the largest logits.

The scan stores the largest logit (the peak) of each strip of 32 tokens. Every token above a value lies in a strip whose
peak is above it, so a search among the peaks, a 32nd of the row, finds a value with at most CHOSEN strips above it.
Only those strips are read again, in the order of their tokens. If the last token that is kept lies above that value,
they hold every kept token: the cut is searched, and the token drawn, among them. Otherwise :mod:`.strip_select` handles
the row.

A search halves an interval of the logits' bit patterns, ordered as the values are: at most 16 rounds for 16-bit logits,
32 for float32. Masses are sums over the candidates in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .noise import arrival, uniforms, words_at
from .row import (
    INFINITY,
    MAX_INDEX,
    TINY,
    floor_of,
    is_filtered,
    is_valid,
    load_blocks,
    rescale,
    scale_of,
)

# State of a row: it needs no filter (or fails, or is greedy); it is drawn; its cut is searched by count or by mass; or
# its groups have bounds, which with the cut is all that the draw needs
PLAIN, DRAWN = tl.constexpr(0), tl.constexpr(1)
BY_COUNT, BY_MASS, RACE, JUDGED = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)


@triton.jit
def key_of(value, DTYPE: tl.constexpr):
    """Return floats' bit patterns as int64 in the floats' order; those of 16-bit logits have 16 bits."""
    if DTYPE.primitive_bitwidth == 16:
        bits = value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 15) & 0x7FFF)
    else:
        bits = value.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.to(tl.int64)


@triton.jit
def value_of(key, DTYPE: tl.constexpr):
    """Return the float32 whose key this is: the inverse of `key_of`."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & (0x7FFF if DTYPE.primitive_bitwidth == 16 else 0x7FFFFFFF))
    if tl.float16 == DTYPE:
        value = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    elif tl.bfloat16 == DTYPE:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def search(x, w, low, high, limit, enough, DTYPE: tl.constexpr):
    """Return the least key above ``low`` with less than ``limit`` of w above its value, and the mass above; ``high`` is
    such a key.

    It stops at a larger key with at least ``enough`` above it.
    """
    over = 0.0
    while (high - low > 1) & (over < enough):
        middle = low + (high - low) // 2
        above = tl.sum(tl.where(x > value_of(middle, DTYPE), w, 0.0))
        holds = above < limit
        low, high = tl.where(holds, low, middle), tl.where(holds, middle, high)
        over = tl.where(holds, above, over)
    return high, over


@triton.jit
def ties_of(limit, over, w, vocab):
    """Return how many tokens of weight w to take, at least one, until the mass before the next reaches ``limit``."""
    return tl.maximum(tl.minimum(tl.ceil(tl.div_rn(limit - over, w)), vocab.to(tl.float32)), 1.0).to(tl.int32)


@triton.jit
def load_strips(row, begin, there, vocab, STRIP: tl.constexpr):
    """Load the strips that begin at ``begin`` [S], one after the other; -inf where there is none."""
    index = begin[:, None] + tl.arange(0, STRIP)[None, :]
    if tl.max(begin, 0) + STRIP <= vocab:  # 16 bytes at a time
        x = tl.load(row + index, mask=there[:, None], other=float("-inf"))
    else:
        x = tl.load(row + index, mask=there[:, None] & (index < vocab), other=float("-inf"))
    return tl.ravel(x.to(tl.float32)), tl.ravel(index)


@triton.jit
def choose_strips(
    n, peaks, chosen, low, high, blocks,
    BLOCKS: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return a key with at most CHOSEN of the row's strips above it, its value, the tokens with which these begin
    [CHOSEN], and where there is one."""
    # By blocks, so that places are counted within a warp.
    block, strip = tl.arange(0, BLOCKS)[:, None], tl.arange(0, STRIPS)[None, :]
    strip += block * STRIPS
    peak = tl.load(peaks + n * blocks * STRIPS + strip, mask=block < blocks, other=-INFINITY)
    edge, _ = search(peak, 1.0, low, high, CHOSEN + 0.5, CHOSEN * 0.875, DTYPE)
    bottom = value_of(edge, DTYPE)
    above = (peak > bottom).to(tl.int32)
    counts = tl.sum(above, 1)
    place = tl.cumsum(above, 1) + (tl.cumsum(counts, 0) - counts)[:, None]
    tl.store(chosen + n * CHOSEN + place - 1, strip, mask=above == 1)
    tl.debug_barrier()
    slot = tl.arange(0, CHOSEN)
    there = slot < tl.sum(counts, 0)
    begin = tl.load(chosen + n * CHOSEN + slot, mask=there, other=0) * STRIP
    return edge, bottom, begin, there


@triton.jit
def draw_candidate(
    n, x, z, w, index, begin, last, ties, floor, seed, step, token, last_kept, kept, STRIP: tl.constexpr
):  # fmt: skip
    """Draw a row's token among its candidates down to ``last``, of which ``ties`` tokens are kept."""
    equal = x == last
    stay = (x > last) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= ties))
    w = tl.where(stay & (w >= floor), w, 0.0)
    tl.store(kept + n, tl.sum(w, 0))
    weighty = w >= TINY
    least = tl.min(tl.where(weighty, x, INFINITY), 0)
    tl.store(last_kept + n, tl.max(tl.where(weighty & (x == least), index, -1), 0).to(tl.int64))
    four = begin[:, None] // 4 + tl.arange(0, STRIP // 4)[None, :]
    words = words_at(tl.load(seed + n), tl.load(step + n), tl.ravel(four))
    score = tl.where(weighty, arrival(uniforms(words)) * tl.exp2(-z), INFINITY)
    first = tl.min(tl.where(score == tl.min(score, 0), index, MAX_INDEX), 0)
    tl.store(token + n, first.to(tl.int64))


@triton.jit(do_not_specialize=["vocab", "blocks"])
def select_kernel(
    logits, temperature, top_k, top_p, min_p, seed, step,  # as in `sample_triton`
    best, mass,  # [N, C], of `scan_kernel`
    peaks,  # [N, C, BLOCK / STRIP] float32, of `scan_kernel`: the largest logit of each strip
    chosen,  # [N, CHOSEN] int32, room: the strips of the candidates
    mode,  # [N] int32, out: PLAIN to RACE
    window,  # [N, 2] int64, out: keys, the cut above the first and not above the second, where it is not found
    left,  # [N] float32, out: the mass that top-k leaves, where it is found
    beyond,  # [N] float32, out: the tokens above the window, or by mass their mass
    cut, cut_index,  # [N], out: the least logit that is kept, and the last index; all, where they are not found
    token, last_kept,  # [N] int64, out, of rows that are drawn
    kept,  # [N] float32, out, of rows that are drawn: sum of w = exp((x - best) / T) over the tokens that are kept
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, STRIPS: tl.constexpr, STRIP: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + n)
    greedy, scale = scale_of(t)
    tops = load_blocks(best, n, blocks, -INFINITY, BLOCKS)
    top = tl.max(tops, 0)
    state = tl.full((), PLAIN, tl.int32)
    if is_valid(n, top, t, top_p, min_p) & is_filtered(n, top_k, top_p, min_p, vocab) & (not greedy):
        _, factor = rescale(tops, top, scale)
        mass_left = tl.sum(load_blocks(mass, n, blocks, 0.0, BLOCKS) * factor, 0)
        # Tokens at low + 1 or below have no weight.
        low = tl.maximum(key_of(top - 104.0 * t, DTYPE), key_of(top - INFINITY, DTYPE) + 1) - 2
        high = key_of(top, DTYPE)

        edge, bottom, begin, there = choose_strips(
            n, peaks, chosen, low, high, blocks, BLOCKS, STRIPS, STRIP, CHOSEN, DTYPE
        )
        x, index = load_strips(logits + n * row_stride, begin, there, vocab, STRIP)
        x = tl.where(x > bottom, x, -INFINITY)
        z = (x - top) * scale
        w = tl.exp2(z)

        # True if a token that is no candidate may have a weight and be kept; exp2 errs by less than 1e-6.
        floor = floor_of(n, min_p)
        rest = tl.exp2((bottom - top) * scale) * 1.00001
        weighs, missing = rest >= TINY, rest >= tl.maximum(floor, TINY)
        unknown = missing if top_p is None else weighs  # top_p is a share of the mass that top_k keeps
        state = tl.where(missing, RACE, DRAWN)
        last = bottom
        ties = 0
        lowest = edge
        if top_k is not None:
            k = tl.load(top_k + n)
            if (k >= 1) & (k < vocab):
                if tl.sum((x > bottom).to(tl.int32), 0) >= k:
                    edge_k, over = search(x, 1.0, edge, high, k.to(tl.float32), INFINITY, DTYPE)
                    last = value_of(edge_k, DTYPE)
                    ties = k - over.to(tl.int32)
                    tied = tl.minimum(ties, tl.sum((x == last).to(tl.int32), 0))
                    mass_left = tl.sum(tl.where(x > last, w, 0.0), 0) + tied * tl.exp2((last - top) * scale)
                    lowest = edge_k - 1
                    state = tl.full((), DRAWN, tl.int32)
                elif unknown:
                    state = tl.full((), BY_COUNT, tl.int32)
        if top_p is not None:
            p = tl.load(top_p + n)
            if (p < 1.0) & (state != BY_COUNT):
                limit = p * mass_left
                if (state == RACE) & (tl.sum(w, 0) < limit):
                    state = tl.full((), BY_MASS, tl.int32)
                else:
                    edge_p, over = search(x, w, lowest, high, limit, INFINITY, DTYPE)
                    value = value_of(edge_p, DTYPE)
                    ties_p = ties_of(limit, over, tl.exp2((value - top) * scale), vocab)
                    ties = tl.where((value == last) & (ties > 0), tl.minimum(ties, ties_p), ties_p)
                    last = value
                    state = tl.full((), DRAWN, tl.int32)

        if state == DRAWN:
            draw_candidate(n, x, z, w, index, begin, last, ties, floor, seed, step, token, last_kept, kept, STRIP)
        else:
            tl.store(window + 2 * n, tl.maximum(low, key_of(top - INFINITY, DTYPE)))
            tl.store(window + 2 * n + 1, edge)
            tl.store(left + n, mass_left)
            tl.store(beyond + n, tl.sum(tl.where(state == BY_COUNT, (x > bottom).to(tl.float32), w), 0))
            tl.store(cut + n, -INFINITY)
            tl.store(cut_index + n, -1)
    tl.store(mode + n, state)
