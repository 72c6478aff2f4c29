"""The cut of rows whose candidates do not hold it: flat distributions, a large top-k, a top-p near 1.

The cut of a row is the least key c with A(c) < limit. A(v) is the number of tokens above v and limit is k, by count; or
A(v) is their mass and limit is p times the row's, by mass. Reading the row for every round of a search would be slow:

    bracket   keys low and high, probably with low < c <= high, from a sample of the row
    gather    A(high), and the tokens that lie above low and not above high; several programs share a row. The last
              search of a row also bounds groups of tokens, as the scan does in rows without filters, by all tokens that
              may be kept
    settle    c among those tokens, and the mass and the last token above it
    race      bounds groups by the tokens that are kept, where gather did not: rows with min-p, or a misleading sample

A group's bound may stem from a token that is not kept, so :func:`.triton.winner` checks each token of a group.

`settle` is exact whatever the sample was: A(high) and the tokens are of the whole row, so A(low) is known too, and
A(high) < limit <= A(low) proves that c lies between. If it does not, or there is no room for the tokens, it searches
the whole row, which is slower.

Top-k comes first and top-p searches the tokens that it keeps, in separate launches. Each kernel is always launched and
ends at once for other rows, so nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .filters import BY_COUNT, BY_MASS, JUDGED, key_of, search, ties_of, value_of
from .noise import bounds_of, least_bounds, least_of_groups, philox, words_of
from .row import INFINITY, MAX_INDEX, TINY, columns, floor_of, is_kept, load_block, load_blocks, log2_weights, scale_of

DEVIATIONS = tl.constexpr(4.0)  # between the estimated cut and the keys; `deviation` derives it
NEXT = tl.constexpr(4)  # adjacent tokens in a sample: few, because neighbours are alike


@triton.jit
def is_searched(n, mode, top_p, MASS: tl.constexpr):
    """Return whether the cut of row n is still to be found, by count or by mass."""
    state = tl.load(mode + n)
    searched = state == BY_COUNT
    if MASS:
        searched = (state == BY_MASS) | (searched & (tl.load(top_p + n) < 1.0))
    return searched


@triton.jit
def limit_of(n, top_k, top_p, left, vocab, MASS: tl.constexpr):
    """Return the limit that has to lie above a token that is not kept, and the total that it is a part of."""
    if MASS:
        total = tl.load(left + n)
        limit = tl.load(top_p + n) * total
    else:
        total = vocab.to(tl.float32)
        limit = tl.load(top_k + n).to(tl.float32)
    return limit, total


@triton.jit
def deviation(squares, one):
    """Return DEVIATIONS standard deviations of S, a sum of w over tokens of the sample, of which ``squares`` sums w^2.

    S estimates m / V of the same sum over the row (m of V tokens are sampled). A token is in the sample with a
    probability of m / V, so the variance of S is at most the sum of the row's w^2 times m / V, which ``squares``
    estimates; ``one`` is the weight of a token at the cut, which may be in the sample or not.

    The bracket holds the cut unless S errs by more than this at one of its keys: by a normal distribution one row in
    16,000 (2 * 3.2e-5), whatever the distribution one in 8 (Cantelli: 2 / (1 + DEVIATIONS^2)). Tokens that are sampled
    side by side and alike count as one, which leaves DEVIATIONS / sqrt(NEXT) = 2. A wrong bracket costs time alone. A
    wider one finds no room: by count up to 2 DEVIATIONS sqrt(m / 2) V / m tokens lie in it, 13,400 of 151,936.
    """
    return DEVIATIONS * tl.sqrt(squares + one * one)


@triton.jit(do_not_specialize=["vocab", "blocks"])
def bracket_kernel(
    logits, temperature, top_k, top_p,  # the call, as in `sample_triton`
    best, mode,  # the row: [N, C], of `scan_kernel`; [N], of `select_kernel`
    window, left, beyond,  # its search: [N, 2], [N], [N], of `select_kernel`, or of `settle_kernel` after top-k
    bracket,  # [N, 2] int64, out: keys, the cut above the first and not above the second, probably
    row_stride, vocab, blocks,
    MASS: tl.constexpr, BLOCKS: tl.constexpr, SAMPLE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    if is_searched(n, mode, top_p, MASS):
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        low, high = tl.load(window + 2 * n), tl.load(window + 2 * n + 1)
        GROUPS: tl.constexpr = SAMPLE // NEXT
        whole = vocab // NEXT
        group = tl.arange(0, GROUPS)[:, None] * tl.maximum(whole, GROUPS) // GROUPS
        there = group < whole
        index = group * NEXT + tl.arange(0, NEXT)[None, :]
        x = tl.load(logits + n * row_stride + index, mask=there, other=float("-inf")).to(tl.float32)
        sampled = tl.minimum(whole, GROUPS) * NEXT
        weight = vocab / sampled.to(tl.float32)  # tokens that one of the sample stands for
        under = there & (x <= value_of(high, DTYPE))
        x = tl.where(under, x, -INFINITY)
        inside = x > value_of(low, DTYPE)
        w = tl.where(inside, tl.exp2((x - top) * scale), 0.0) if MASS else under.to(tl.float32)
        if tl.sum(inside.to(tl.float32)) * weight > ROOM // 2:
            # The mass above a key: the known part plus the sample's, or everything minus the sample's part below. The
            # better estimate is the one with the smaller part to guess.
            limit, total = limit_of(n, top_k, top_p, left, vocab, MASS)
            from_above = 2 * limit < total
            above, below = limit - tl.load(beyond + n), total - limit
            limit = tl.where(from_above, tl.div_rn(above, weight), tl.sum(w) - tl.div_rn(below, weight))
            middle, _ = search(x, w, low, high, limit, INFINITY, DTYPE)
            value = value_of(middle, DTYPE)
            squares = tl.sum(tl.where((x > value) == from_above, w * w, 0.0))
            error = deviation(squares, tl.exp2((value - top) * scale) if MASS else 1.0)
            upper, _ = search(x, w, low, high, limit - error, INFINITY, DTYPE)
            lower, _ = search(x, w, low, high, limit + error, INFINITY, DTYPE)
            low, high = lower - 1, upper
        tl.store(bracket + 2 * n, low)
        tl.store(bracket + 2 * n + 1, high)


@triton.jit
def least_above(x, bottom, top, scale, seed, step, counter, WIDTH: tl.constexpr):
    """Return the least bound of each thread's tokens above ``bottom``; x has WIDTH columns, of `columns`."""
    least = tl.full(x[0].shape, MAX_INDEX, tl.int32)
    for j in tl.static_range(WIDTH):
        if j % 4 == 0:
            words = philox(seed, step, counter + j // 4)
        w = tl.where(x[j] > bottom, tl.exp2((x[j] - top) * scale), 0.0)
        least = tl.minimum(least, bounds_of(words[j % 4], w))
    return least


@triton.jit(do_not_specialize=["vocab", "blocks"])
def gather_kernel(
    logits, temperature, top_p, seed, step,  # the call, as in `sample_triton`
    best, mode,  # the row: [N, C], of `scan_kernel`; [N], of `select_kernel`
    bracket,  # [N, 2], of `bracket_kernel`
    between,  # [N, SPLITS, ROOM / SPLITS] int32, out: tokens between its keys, if there is room for them
    counts,  # [N, SPLITS] int32, out: how many there are
    over,  # [N, SPLITS, 2] float32, out: the tokens above them, and their mass
    bound,  # out, of a row's last search: as of `scan_kernel`, of the tokens above the lower key, beside the row's best
    row_stride, vocab, blocks,
    MASS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_searched(n, mode, top_p, MASS):
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        bottom = value_of(tl.load(bracket + 2 * n), DTYPE)
        ceiling = value_of(tl.load(bracket + 2 * n + 1), DTYPE)
        WIDTH: tl.constexpr = 128 // DTYPE.primitive_bitwidth  # neighbours in a thread: sums by columns stay within it
        EACH: tl.constexpr = ROOM // SPLITS
        lane = tl.arange(0, BLOCK // WIDTH)
        many, mass = tl.zeros_like(lane), tl.zeros((BLOCK // WIDTH,), tl.float32)
        count = 0
        room = between + (n * SPLITS + split) * EACH
        seed_of, step_of = tl.load(seed + n), tl.load(step + n)
        is_last = True
        if not MASS and top_p is not None:
            is_last = tl.load(top_p + n) >= 1.0
        for block in range(split, blocks, SPLITS):
            begin = block * BLOCK
            x = columns(load_block(logits + n * row_stride, begin, vocab, BLOCK), WIDTH)
            each = tl.zeros_like(lane)
            for j in tl.static_range(WIDTH):
                above = x[j] > ceiling
                if not MASS:
                    many += above.to(tl.int32)
                mass += tl.where(above, tl.exp2((x[j] - top) * scale), 0.0)
                each += ((x[j] > bottom) ^ above).to(tl.int32)
            if is_last:
                counter = begin // 4 + WIDTH // 4 * lane
                least = least_above(x, bottom, top, scale, seed_of, step_of, counter, WIDTH)
                at = (n * blocks + block) * GROUPS + tl.arange(0, GROUPS)
                tl.store(bound + at, least_of_groups(least, GROUPS))
            listed = tl.sum(each, 0)
            if count + listed <= EACH:
                place = count + tl.cumsum(each, 0) - each
                for j in tl.static_range(WIDTH):
                    inside = (x[j] > bottom) ^ (x[j] > ceiling)
                    tl.store(room + place, begin + lane * WIDTH + j, mask=inside)
                    place += inside.to(tl.int32)
            count += listed
        at = n * SPLITS + split
        tl.store(counts + at, count)
        tl.store(over + 2 * at, tl.sum(many).to(tl.float32))
        tl.store(over + 2 * at + 1, tl.sum(mass))


@triton.jit
def above_in_row(row, value, top, scale, vocab, ROUND: tl.constexpr):
    """Return how many tokens of a whole row lie above a value, their mass, and how many equal it."""
    many, mass, equal = tl.zeros((ROUND,), tl.float32), tl.zeros((ROUND,), tl.float32), tl.zeros((ROUND,), tl.int32)
    for begin in range(0, vocab, ROUND):
        x = load_block(row, begin, vocab, ROUND)
        many += (x > value).to(tl.float32)
        mass += tl.where(x > value, tl.exp2((x - top) * scale), 0.0)
        equal += (x == value).to(tl.int32)
    return tl.sum(many, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def search_row(row, low, high, limit, top, scale, vocab, MASS: tl.constexpr, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """Like `search`, among all tokens of a row."""
    while high - low > 1:
        middle = low + (high - low) // 2
        many, mass, _equal = above_in_row(row, value_of(middle, DTYPE), top, scale, vocab, ROUND)
        holds = (mass if MASS else many) < limit
        low, high = tl.where(holds, low, middle), tl.where(holds, middle, high)
    return high


@triton.jit
def index_of(row, value, ties, vocab, ROUND: tl.constexpr):
    """Return the index of the token that is number ``ties`` of those equal to ``value``."""
    seen = 0
    begin = 0
    index = -1
    while (seen < ties) & (begin < vocab):
        equal = (load_block(row, begin, vocab, ROUND) == value).to(tl.int32)
        many = tl.sum(equal, 0)
        if seen + many >= ties:
            is_last = (equal == 1) & (tl.cumsum(equal, 0) == ties - seen)
            index = begin + tl.max(tl.where(is_last, tl.arange(0, ROUND), 0), 0)
        seen += many
        begin += ROUND
    return index


@triton.jit
def find_cut(
    row, n, window, bracket, between, counts, over, limit, top, scale, vocab,
    MASS: tl.constexpr, DTYPE: tl.constexpr, ROUND: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Return the cut's key and value, the number and mass of the tokens above it, how many equal it, and whether the
    bracket led to it."""
    EACH: tl.constexpr = ROOM // SPLITS
    split, slot = n * SPLITS + tl.arange(0, SPLITS), tl.arange(0, EACH)[None, :]
    count = tl.load(counts + split)
    many, mass = tl.sum(tl.load(over + 2 * split), 0), tl.sum(tl.load(over + 2 * split + 1), 0)
    fits = tl.max(count, 0) <= EACH
    there = slot < tl.where(fits, count, 0)[:, None]
    index = tl.load(between + split[:, None] * EACH + slot, mask=there, other=0)
    x = tl.load(row + index, mask=there, other=float("-inf")).to(tl.float32)
    amount = tl.exp2((x - top) * scale) if MASS else 1.0
    above = mass if MASS else many
    listed = tl.sum(amount) if MASS else tl.sum(count, 0).to(tl.float32)
    low, high = tl.load(window + 2 * n), tl.load(window + 2 * n + 1)
    under, upper = tl.load(bracket + 2 * n), tl.load(bracket + 2 * n + 1)
    holds = above < limit
    led = holds & fits & ((under == low) | (above + listed >= limit))
    if led:
        key, _ = search(x, amount, under, upper, limit - above, INFINITY, DTYPE)
        value = value_of(key, DTYPE)
        many += tl.sum((x > value).to(tl.float32))
        mass += tl.sum(tl.where(x > value, tl.exp2((x - top) * scale), 0.0))
        equal = tl.sum((x == value).to(tl.int32))
    else:
        low, high = tl.where(holds, low, upper), tl.where(holds, upper, high)
        key = search_row(row, low, high, limit, top, scale, vocab, MASS, DTYPE, ROUND)
        value = value_of(key, DTYPE)
        many, mass, equal = above_in_row(row, value, top, scale, vocab, ROUND)
    return key, value, many, mass, equal, led


@triton.jit(do_not_specialize=["vocab", "blocks"])
def settle_kernel(
    logits, temperature, top_k, top_p, min_p,  # the call, as in `sample_triton`
    best, mode,  # the row: [N, C], of `scan_kernel`; [N], of `select_kernel`, out: JUDGED, if only the draw is left
    window, left, beyond,  # its search, of `select_kernel`; out for top-p, where top-k was searched
    bracket, between, counts, over,  # its tokens about the cut, of `bracket_kernel` and `gather_kernel`
    cut, ties, cut_index,  # [N] float32, int32, int32, out: the least logit that is kept, how many tokens equal to it
    # top-k keeps, the last of those that are kept
    drawn, last_kept,  # [N] float32, int64, out, of rows that are JUDGED: the mass that is kept, the last token
    row_stride, vocab, blocks,
    MASS: tl.constexpr, BLOCKS: tl.constexpr, ROUND: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = logits.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    if is_searched(n, mode, top_p, MASS):
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        row = logits + n * row_stride
        limit, _total = limit_of(n, top_k, top_p, left, vocab, MASS)
        key, value, many, mass, equal, led = find_cut(
            row, n, window, bracket, between, counts, over, limit, top, scale, vocab, MASS, DTYPE, ROUND, SPLITS, ROOM
        )
        one = tl.exp2((value - top) * scale)
        ends = True
        if MASS:
            tied = ties_of(limit, mass, one, vocab)
            if top_k is not None:  # noqa: SIM102 (the first is decided when compiling)
                if (tl.load(mode + n) == BY_COUNT) & (tl.load(cut + n) == value):
                    tied = tl.minimum(tied, tl.load(ties + n))
        else:
            tied = tl.load(top_k + n) - many.to(tl.int32)
            tl.store(ties + n, tied)
            if top_p is not None:  # noqa: SIM102 (the first is decided when compiling)
                if tl.load(top_p + n) < 1.0:
                    ends = False
                    tl.store(left + n, mass + tl.minimum(tied, equal) * one)
                    tl.store(beyond + n, 0.0)
                    tl.store(window + 2 * n, key - 1)
                    tl.store(window + 2 * n + 1, key_of(top, DTYPE))
        tl.store(cut + n, value)
        last = tl.full((), MAX_INDEX, tl.int32)
        judged = ends & led & (one >= tl.maximum(floor_of(n, min_p), TINY))  # then min_p keeps what the cut keeps
        tied = tl.minimum(tied, equal)
        if judged | (ends & (tied < equal)):
            last = index_of(row, value, tied, vocab, ROUND)
        if judged:
            tl.store(drawn + n, mass + tied * one)
            tl.store(last_kept + n, last.to(tl.int64))
            tl.store(mode + n, JUDGED)
        tl.store(cut_index + n, last)


@triton.jit(do_not_specialize=["vocab", "blocks"])
def race_kernel(
    logits, temperature, min_p, seed, step,  # as in `sample_triton`
    best,  # [N, C], of `scan_kernel`
    mode, cut, cut_index,  # [N], of `select_kernel` and `settle_kernel`
    kept,  # [N, C] float32, out: sum of w = exp((x - best of the row) / T) over the tokens that are kept
    least, bound,  # out: as of `scan_kernel`, of the tokens that are kept, beside the row's best
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    state = tl.load(mode + n)
    if (state >= BY_COUNT) & (state != JUDGED):
        _greedy, scale = scale_of(tl.load(temperature + n))
        top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
        value, last, floor = tl.load(cut + n), tl.load(cut_index + n), floor_of(n, min_p)
        for block in range(tl.program_id(1), blocks, SPLITS):
            at, begin = n * blocks + block, block * BLOCK
            x = load_block(logits + n * row_stride, begin, vocab, BLOCK)
            w = tl.exp2(log2_weights(x, top, scale))
            w = tl.where(is_kept(x, w, begin + tl.arange(0, BLOCK), floor, value, last), w, 0.0)
            tl.store(kept + at, tl.sum(w, 0))
            tl.store(least + at, tl.min(tl.where(w >= TINY, x, INFINITY), 0))
            WIDTH: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            words = words_of(tl.load(seed + n), tl.load(step + n), begin, BLOCK, WIDTH)
            tl.store(bound + at * GROUPS + tl.arange(0, GROUPS), least_bounds(words, w, GROUPS))
