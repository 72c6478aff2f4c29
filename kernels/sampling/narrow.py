"""The cut of rows whose candidates do not hold it: flat distributions, a large top-k, a top-p near 1.

Every pass splits such a row over programs, which count and weigh the tokens above 17 keys that cut an interval into
sixteenths; the next pass, which is another launch, puts their sums together, in their order, and goes on within the
sixteenth that holds the cut. 4 passes end with one value for 16-bit logits, 8 for float32; top-k and top-p take turns.
Each pass is launched always, and ends at once for other rows: nothing waits for the host.

Then :func:`race_kernel` judges the tokens that are kept, as the scan does those of rows without filters.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .filters import BY_COUNT, BY_MASS, key_of, ties_of, value_of
from .noise import least_bounds, words_of
from .row import INFINITY, TINY, floor_of, load_block, load_blocks, log2_weights, scale_of

PARTS = tl.constexpr(16)  # of an interval, for each pass
SUMS = tl.constexpr(32)  # room for one of each of their ends


@triton.jit
def end_of(low, high, i):
    """The i-th of the keys that cut an interval into PARTS, the first and last of which are its own."""
    return low + ((high - low) * i + PARTS - 1) // PARTS


@triton.jit
def load_sums(tally, n, number, MASS: tl.constexpr, SPLITS: tl.constexpr):
    """[SPLITS, SUMS]: what each program of a pass counted, or weighed, above each key."""
    at = ((number % 2 * tl.num_programs(0) + n) * SPLITS + tl.arange(0, SPLITS)) * 2 + MASS
    return tl.load(tally + at[:, None] * SUMS + tl.arange(0, SUMS)[None, :])


@triton.jit
def around_cut(window, tally, n, number, limit, MASS: tl.constexpr, SPLITS: tl.constexpr):
    """Of pass ``number`` for row n: the keys next to each other, the upper one of which has less than ``limit`` above
    it; and which they are."""
    at = 2 * (number * tl.num_programs(0) + n)
    low, high = tl.load(window + at), tl.load(window + at + 1)
    i = tl.arange(0, SUMS)
    holds = tl.sum(load_sums(tally, n, number, MASS, SPLITS), 0) < limit
    upper = PARTS - tl.sum((holds & (i > 0) & (i < PARTS)).to(tl.int32), 0)  # the last is known to hold
    above = end_of(low, high, upper)
    lower = tl.sum(((end_of(low, high, i) < above) & (i < PARTS)).to(tl.int32), 0) - 1
    return end_of(low, high, lower), above, lower, upper


@triton.jit
def cut_of(window, tally, n, number, limit, MASS: tl.constexpr, SPLITS: tl.constexpr):
    """The last pass's result for row n: the key of the cut; by splits, how many tokens lie above it and how many equal
    it; and the mass above it."""
    _key, key, lower, upper = around_cut(window, tally, n, number, limit, MASS, SPLITS)
    i = tl.arange(0, SUMS)
    counts = load_sums(tally, n, number, False, SPLITS)
    over = tl.sum(tl.where(i[None, :] == upper, counts, 0.0), 1)
    equal = tl.sum(tl.where(i[None, :] == lower, counts, 0.0), 1) - over
    mass = tl.sum(tl.where(i == upper, tl.sum(load_sums(tally, n, number, True, SPLITS), 0), 0.0), 0)
    return key, over, equal, mass


@triton.jit
def split_of(blocks, SPLITS: tl.constexpr):
    """The blocks of this program."""
    share = tl.cdiv(blocks, SPLITS)
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, blocks)


@triton.jit(do_not_specialize=["number", "begin", "vocab", "blocks"])
def narrow_kernel(
    logits, temperature, top_k, top_p,  # as in `sample_triton`
    best,  # [N, C], of `scan_kernel`
    mode,  # [N], of `select_kernel`
    window,  # [1 + passes, N, 2] int64: the first of `select_kernel`, out: the next
    left,  # [N], of `select_kernel`, out: where top-k was searched here
    tally,  # [2, N, SPLITS, 2, SUMS] float32, by turns: the tokens above each key and their mass
    number, begin,  # this pass, and the first that searches by mass
    row_stride, vocab, blocks,
    MASS: tl.constexpr, LAST: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state = tl.load(mode + n)
    mine = state == BY_COUNT
    if MASS:
        mine = (state == BY_MASS) | (mine & (tl.load(top_p + n) < 1.0))
    if mine:
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        low, high = tl.load(window + 2 * n), tl.load(window + 2 * n + 1)
        if MASS:
            if number > begin:
                limit = tl.load(top_p + n) * tl.load(left + n)
                low, high, _lower, _upper = around_cut(window, tally, n, number - 1, limit, True, SPLITS)
            if top_k is not None:  # noqa: SIM102 (the first is decided when compiling)
                if (number == begin) & (state == BY_COUNT):
                    k = tl.load(top_k + n).to(tl.float32)
                    edge, over, equal, mass_over = cut_of(window, tally, n, number - 1, k, False, SPLITS)
                    tied = tl.minimum(k - tl.sum(over, 0), tl.sum(equal, 0))
                    if split == 0:
                        tl.store(left + n, mass_over + tied * tl.exp2((value_of(edge, DTYPE) - top) * scale))
                    low, high = edge - 1, key_of(top, DTYPE)
        elif number > 0:
            k = tl.load(top_k + n).to(tl.float32)
            low, high, _lower, _upper = around_cut(window, tally, n, number - 1, k, False, SPLITS)
        if (split == 0) & (number > 0):
            at = 2 * (number * tl.num_programs(0) + n)
            tl.store(window + at, low)
            tl.store(window + at + 1, high)

        i = tl.arange(0, PARTS)
        value, highest = value_of(end_of(low, high, i), DTYPE), value_of(high, DTYPE)
        counts, masses = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS,), tl.float32)
        count = 0.0  # above the upper end, which the last pass needs too
        mass = 0.0
        first, last = split_of(blocks, SPLITS)
        STEP: tl.constexpr = ROUND // 2 if LAST else ROUND  # as registers allow
        for begin_at in range(first * BLOCK, tl.minimum(last * BLOCK, vocab), STEP):
            x = load_block(logits + n * row_stride, begin_at, vocab, STEP)
            w = tl.exp2((x - top) * scale)
            above = x[None, :] > value[:, None]
            if LAST or not MASS:
                counts += tl.sum(tl.where(above, 1.0, 0.0), 1)
            if LAST or MASS:
                masses += tl.sum(tl.where(above, w[None, :], 0.0), 1)
            if LAST:
                count += tl.sum(tl.where(x > highest, 1.0, 0.0), 0)
                mass += tl.sum(tl.where(x > highest, w, 0.0), 0)
        at = tally + ((number % 2 * tl.num_programs(0) + n) * SPLITS + split) * 2 * SUMS
        if LAST or not MASS:
            tl.store(at + i, counts)
        if LAST or MASS:
            tl.store(at + SUMS + i, masses)
        if LAST:
            tl.store(at + PARTS, count)
            tl.store(at + SUMS + PARTS, mass)


@triton.jit(do_not_specialize=["passes", "begin", "vocab", "blocks"])
def race_kernel(
    logits, temperature, top_k, top_p, min_p, seed, step,  # as in `sample_triton`
    best,  # [N, C], of `scan_kernel`
    mode, window, left, tally,  # of `narrow_kernel`
    cut,  # [N] float32, out: the least logit that is kept
    cut_index,  # [N, SPLITS] int32, out: the last index that is kept among logits equal to it, -1 where none is
    kept,  # [N, C] float32, out: sum of w = exp((x - best of the row) / T) over the tokens that are kept
    least, bound,  # out: as of `scan_kernel`, of the tokens that are kept, beside the row's best
    passes, begin,  # of `narrow_kernel`: how many, and the first that searches by mass
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state = tl.load(mode + n)
    if state >= BY_COUNT:
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        value = -INFINITY
        ties = 0
        before = tl.zeros((SPLITS,), tl.float32)
        by_mass = state == BY_MASS
        if top_p is not None:
            p = tl.load(top_p + n)
            by_mass |= (state == BY_COUNT) & (p < 1.0)
            if by_mass:
                limit = p * tl.load(left + n)
                edge, over, before, mass = cut_of(window, tally, n, passes - 1, limit, True, SPLITS)
                value = value_of(edge, DTYPE)
                ties = ties_of(limit, mass, tl.exp2((value - top) * scale), vocab)
                if top_k is not None:  # noqa: SIM102 (the first is decided when compiling)
                    if state == BY_COUNT:
                        ties = tl.minimum(ties, tl.load(top_k + n) - tl.sum(over, 0).to(tl.int32))
        if top_k is not None:  # noqa: SIM102 (the first is decided when compiling)
            if (state == BY_COUNT) & (not by_mass):
                k = tl.load(top_k + n)
                edge, over, before, mass = cut_of(window, tally, n, begin - 1, k.to(tl.float32), False, SPLITS)
                value = value_of(edge, DTYPE)
                ties = k - tl.sum(over, 0).to(tl.int32)
        ties -= tl.sum(tl.where(tl.arange(0, SPLITS) < split, before, 0.0), 0).to(tl.int32)

        floor = floor_of(n, min_p)
        last_equal = -1
        first, last = split_of(blocks, SPLITS)
        for block in range(first, last):
            at, begin_at = n * blocks + block, block * BLOCK
            x = load_block(logits + n * row_stride, begin_at, vocab, BLOCK)
            w = tl.exp2(log2_weights(x, top, scale))
            equal = (x == value).to(tl.int32)
            fits = (equal == 1) & (tl.cumsum(equal, 0) <= ties)
            ties -= tl.sum(equal, 0)
            last_equal = tl.maximum(last_equal, tl.max(tl.where(fits, begin_at + tl.arange(0, BLOCK), -1), 0))
            w = tl.where(((x > value) | fits) & (w >= floor), w, 0.0)
            tl.store(kept + at, tl.sum(w, 0))
            tl.store(least + at, tl.min(tl.where(w >= TINY, x, INFINITY), 0))
            WIDTH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
            words = words_of(tl.load(seed + n), tl.load(step + n), begin_at, BLOCK, WIDTH)
            tl.store(bound + at * GROUPS + tl.arange(0, GROUPS), least_bounds(words, w, BLOCK, GROUPS))
        tl.store(cut + n, value)
        tl.store(cut_index + n * SPLITS + split, last_equal)
