"""Triton backend of :func:`sample_tokens`: a row is cut into blocks of tokens, one program each; no sort.

    scan    a block: largest logit, sums of w and w log2 w, and without filters the race of its tokens
    select  a row with top-k or top-p: the value and index of the last token they keep
    race    a block, with filters: the race of the tokens they keep
    finish  a row: its blocks put together

Without filters the logits are read once, 4 bytes a token of fp32 and 2 of bf16, 16 bytes a thread at a time; a block
writes eight numbers, and nothing of [N, V] is written. With filters they are read twice, and once more for each round
of a search: a round counts, or weighs, what lies above seven thresholds at once, and the search ends as soon as one
value is left between two of them (six rounds part values, at most eleven more part bits). How a row is cut depends on
nothing but its length, and blocks are put together in their order, so a row's bits do not depend on the batch.

Order of the tokens, masses and noise are those of :mod:`.reference`. No parameter is read on the host: calls can be
captured in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of a program; part of the summation order, so not tuned by shape
ROUND = 2048  # tokens that a search handles at once
INFINITY = tl.constexpr(float("inf"))
TINY = tl.constexpr(1.1754943508222875e-38)
NOTHING = tl.constexpr(
    -127.0
)  # log2 of a weight that cannot be drawn: its E / w is above 2^93, the best one's below 2^5
MAX_INDEX = tl.constexpr(0x7FFFFFFF)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def ordered_bits(bits):
    """Float bit patterns as int32 in the floats' order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_block(row, begin, vocab, BLOCK: tl.constexpr):
    index = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= vocab:  # without a mask, 16 bytes at a time
        x = tl.load(row + index)
    else:
        x = tl.load(row + index, mask=index < vocab, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def uniforms(seed, step, begin, BLOCK: tl.constexpr):
    """t of tokens ``begin`` to ``begin + BLOCK - 1``: four tokens share a Philox counter."""
    group = (begin // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    step_lo = (step & 0xFFFFFFFF).to(tl.uint32)
    step_hi = ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, group, 0, step_lo, step_hi)
    words = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def arrival(t):
    """E = -log(1 - t) to 2e-7 relative, however small t is: 1 - t = 2^e (1 + f), and where e is 0, f is -t itself."""
    bits = (1.0 - t).to(tl.int32, bitcast=True)
    e = (bits - 0x3F2AAAAB) & -0x800000
    f = tl.where(e == 0, -t, (bits - e).to(tl.float32, bitcast=True) - 1.0)
    # p: the least error of (log(1 + f) - f + f^2 / 2) / f^3 in [-1/3, 1/3]
    p = f * 0.1401381939649582 - 0.15139269828796387
    p = p * f + 0.13999086618423462
    p = p * f - 0.1646934598684311
    p = p * f + 0.20010896027088165
    p = p * f - 0.2500436305999756
    p = p * f + 0.3333320617675781
    p = (p * f - 0.5) * (f * f) + f
    return e.to(tl.float32) * -8.262958e-8 - p  # ln 2 / 2^23


@triton.jit
def scale_of(temperature):
    """Whether a temperature means greedy, and log2(e) over it: weights are powers of two."""
    greedy = temperature < TINY
    return greedy, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)) * LOG2E


@triton.jit
def log2_weights(x, best, scale):
    return tl.maximum((x - best) * scale, NOTHING)


@triton.jit
def race(x, z, w, best, greedy, seed, step, begin, at, score, chosen, least, last, BLOCK: tl.constexpr):
    """Of tokens with weights w = 2^z: the least E / w and its lowest index; the least logit drawn from, its highest."""
    index = begin + tl.arange(0, BLOCK)
    if greedy:  # noqa: SIM108 (a branch: only one of them is computed)
        lane = tl.where(x == best, 0.0, 1.0)
    else:
        lane = arrival(uniforms(seed, step, begin, BLOCK)) * tl.exp2(-z)
    first = tl.min(lane, 0)
    tl.store(score + at, first)
    tl.store(chosen + at, tl.min(tl.where(lane == first, index, MAX_INDEX), 0))
    drawn = tl.where(w >= TINY, x, INFINITY)
    bottom = tl.min(drawn, 0)
    tl.store(least + at, bottom)
    tl.store(last + at, tl.max(tl.where(drawn == bottom, index, -1), 0))


@triton.jit(do_not_specialize=["vocab"])
def scan_kernel(
    logits,  # [N, V], rows row_stride apart
    temperature,  # [N] float32
    seed,  # [N] int64
    step,  # [N] int64
    best,  # [N, C] float32, out: the largest logit, +inf where one is NaN or +inf
    mass,  # [N, C] float32, out: sum of w = exp((x - best of the block) / T)
    moment,  # [N, C] float32, out: sum of w log2 w
    raw,  # [N, C] float32, out: the mass at T = 1
    score, chosen, least, last,  # [N, C] out: see `race`; without filters only (float32, int32, float32, int32)
    row_stride, vocab,
    BLOCK: tl.constexpr, RACE: tl.constexpr,
):  # fmt: skip
    n, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    at = n * tl.num_programs(1) + tl.program_id(1)
    greedy, scale = scale_of(tl.load(temperature + n))
    x = load_block(logits + n * row_stride, begin, vocab, BLOCK)
    top = tl.max(tl.where(x < INFINITY, x, INFINITY), 0)
    base = tl.where(top == -INFINITY, 0.0, top)
    z = log2_weights(x, base, scale)
    w = tl.exp2(z)
    total = tl.sum(w, 0)
    tl.store(best + at, top)
    tl.store(mass + at, total)
    tl.store(moment + at, tl.sum(w * z, 0))
    if scale != LOG2E:
        tl.store(raw + at, tl.sum(tl.exp2((x - base) * LOG2E), 0))
    else:
        tl.store(raw + at, total)
    if RACE:
        race(x, z, w, top, greedy, tl.load(seed + n), tl.load(step + n), begin, at, score, chosen, least, last, BLOCK)


@triton.jit
def above(lanes, x, w, value):
    return lanes + tl.where(x > value, w, 0.0)


@triton.jit
def between(lo, hi, eighths, rounds):
    """A threshold between two logits; after six rounds by their bits, so that the search ends."""
    if rounds < 6:
        value = lo * (1.0 - eighths * 0.125) + hi * (eighths * 0.125)
    else:
        a = ordered_bits(lo.to(tl.int32, bitcast=True)).to(tl.int64)
        b = ordered_bits(hi.to(tl.int32, bitcast=True)).to(tl.int64)
        value = ordered_bits((a + (b - a) * eighths // 8).to(tl.int32)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def search(row, best, scale, lo, limit, vocab, BY_MASS: tl.constexpr, ROUND: tl.constexpr):
    """The least logit above ``lo`` with less than ``limit`` above it, that, and how many tokens have it.

    What lies above is counted, or weighed, in float32: counts of less than 2^24 are exact. The largest always holds.
    """
    hi = best
    over = 0.0
    tied = 0
    rounds = 0
    ended = False
    while not ended:
        v1, v2 = between(lo, hi, 1, rounds), between(lo, hi, 2, rounds)
        v3, v4 = between(lo, hi, 3, rounds), between(lo, hi, 4, rounds)
        v5, v6, v7 = between(lo, hi, 5, rounds), between(lo, hi, 6, rounds), between(lo, hi, 7, rounds)
        zero = tl.zeros((ROUND,), tl.float32)
        a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero
        largest = tl.full((ROUND,), -INFINITY, tl.float32)
        smallest = tl.full((ROUND,), INFINITY, tl.float32)
        count = tl.zeros((ROUND,), tl.int32)
        for begin in range(0, vocab, ROUND):
            x = load_block(row, begin, vocab, ROUND)
            w = tl.full((ROUND,), 1.0, tl.float32)
            if BY_MASS:
                w = tl.exp2((x - best) * scale)
            a1, a2, a3, a4 = above(a1, x, w, v1), above(a2, x, w, v2), above(a3, x, w, v3), above(a4, x, w, v4)
            a5, a6, a7 = above(a5, x, w, v5), above(a6, x, w, v6), above(a7, x, w, v7)
            inside = (x > lo) & (x <= hi)
            count += inside.to(tl.int32)
            largest = tl.maximum(largest, tl.where(inside, x, -INFINITY))
            smallest = tl.minimum(smallest, tl.where(inside, x, INFINITY))
        ended = tl.min(smallest, 0) >= tl.max(largest, 0)
        if ended:
            hi = tl.max(largest, 0)
            tied = tl.sum(count, 0)
        else:
            lo, hi, over = narrow(lo, hi, over, v7, tl.sum(a7, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v6, tl.sum(a6, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v5, tl.sum(a5, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v4, tl.sum(a4, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v3, tl.sum(a3, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v2, tl.sum(a2, 0), limit)
            lo, hi, over = narrow(lo, hi, over, v1, tl.sum(a1, 0), limit)
        rounds += 1
    return hi, over, tied


@triton.jit
def narrow(lo, hi, over, value, found, limit):
    """Thresholds come from the largest down: one that holds is the new upper end, one that fails a lower end."""
    holds = found < limit
    return tl.where(holds, lo, tl.maximum(lo, value)), tl.where(holds, value, hi), tl.where(holds, found, over)


@triton.jit
def index_of(row, value, which, vocab, ROUND: tl.constexpr):
    """The index of the ``which``-th token, from 1, whose logit is ``value``."""
    seen = 0
    lane = tl.zeros((ROUND,), tl.int32)
    for begin in range(0, vocab, ROUND):
        equal = (load_block(row, begin, vocab, ROUND) == value).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        lane = tl.where((equal == 1) & (rank == which), begin + tl.arange(0, ROUND), lane)
        seen += tl.sum(equal, 0)
    return tl.max(lane, 0)


@triton.jit
def load_blocks(values, n, blocks, other, BLOCKS: tl.constexpr):
    """What the blocks of row n found."""
    b = tl.arange(0, BLOCKS)
    return tl.load(values + n * blocks + b, mask=b < blocks, other=other)


@triton.jit
def rescale(tops, top, scale):
    """What is added to the log2 of a block's weights to make them weights of the row, and its power."""
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


@triton.jit(do_not_specialize=["vocab", "blocks"])
def select_kernel(
    logits, temperature, top_k, top_p, min_p,  # as in `sample_triton`
    best, mass,  # [N, C], of `scan_kernel`
    cut,  # [N] float32, out: the least logit that is kept
    cut_index,  # [N] int32, out: the last index that is kept among logits equal to it
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * row_stride
    t = tl.load(temperature + n)
    greedy, scale = scale_of(t)
    tops = load_blocks(best, n, blocks, -INFINITY, BLOCKS)
    top = tl.max(tops, 0)
    last = -INFINITY
    ties = vocab
    tied = 0
    if is_valid(n, top, t, top_p, min_p) & (not greedy):
        _, factor = rescale(tops, top, scale)
        kept_mass = tl.sum(load_blocks(mass, n, blocks, 0.0, BLOCKS) * factor, 0)
        bottom = top - 104.0 * t  # what lies below weighs nothing
        if top_k is not None:
            k = tl.load(top_k + n)
            if (k >= 1) & (k < vocab):
                last, over, tied = search(row, top, scale, bottom, k.to(tl.float32), vocab, False, ROUND)
                ties = k - over.to(tl.int32)
                kept_mass = mass_above(row, top, scale, last, vocab, ROUND)
                kept_mass += tl.minimum(ties, tied) * tl.exp2((last - top) * scale)
        if top_p is not None:
            p = tl.load(top_p + n)
            if p < 1.0:
                k_last = last
                limit = p * kept_mass
                last, over, tied = search(row, top, scale, bottom, limit, vocab, True, ROUND)
                missing = tl.ceil(tl.div_rn(limit - over, tl.exp2((last - top) * scale)))
                p_ties = tl.maximum(tl.minimum(missing, vocab.to(tl.float32)), 1.0).to(tl.int32)
                ties = tl.where(last == k_last, tl.minimum(ties, p_ties), p_ties)
                # Rounded, the mass may call for less likely tokens than top-k leaves.
                if last < k_last:
                    last = k_last
                    ties = 0
    index = vocab
    if ties < tied:
        index = index_of(row, last, ties, vocab, ROUND)
    tl.store(cut + n, last)
    tl.store(cut_index + n, index)


@triton.jit
def mass_above(row, best, scale, value, vocab, ROUND: tl.constexpr):
    lanes = tl.zeros((ROUND,), tl.float32)
    for begin in range(0, vocab, ROUND):
        x = load_block(row, begin, vocab, ROUND)
        lanes = above(lanes, x, tl.exp2((x - best) * scale), value)
    return tl.sum(lanes, 0)


@triton.jit(do_not_specialize=["vocab"])
def race_kernel(
    logits, temperature, min_p, seed, step,  # as in `sample_triton`
    best,  # [N, C], of `scan_kernel`
    cut, cut_index,  # [N], of `select_kernel`, or None
    kept,  # [N, C] float32, out: sum of w = exp((x - best of the row) / T) over the tokens that are kept
    score, chosen, least, last,  # [N, C] out: see `race`
    row_stride, vocab,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    blocks = tl.num_programs(1)
    at = n * blocks + tl.program_id(1)
    greedy, scale = scale_of(tl.load(temperature + n))
    top = tl.max(load_blocks(best, n, blocks, -INFINITY, BLOCKS), 0)
    x = load_block(logits + n * row_stride, begin, vocab, BLOCK)
    z = log2_weights(x, top, scale)
    if min_p is not None:  # the best token, of weight 1, always stays
        z = tl.where(tl.exp2(z) >= tl.minimum(tl.load(min_p + n), 1.0), z, NOTHING)
    if cut is not None:
        value, index = tl.load(cut + n), begin + tl.arange(0, BLOCK)
        z = tl.where((x > value) | ((x == value) & (index <= tl.load(cut_index + n))), z, NOTHING)
    w = tl.exp2(z)
    tl.store(kept + at, tl.sum(w, 0))
    race(x, z, w, top, greedy, tl.load(seed + n), tl.load(step + n), begin, at, score, chosen, least, last, BLOCK)


@triton.jit
def last_drawn(row, best, scale, vocab, ROUND: tl.constexpr):
    """The highest index of the least logit with a weight."""
    lane_least = tl.full((ROUND,), INFINITY, tl.float32)
    lane_last = tl.zeros((ROUND,), tl.int32)
    for begin in range(0, vocab, ROUND):
        x = load_block(row, begin, vocab, ROUND)
        later = (tl.exp2((x - best) * scale) >= TINY) & (x <= lane_least)
        lane_least = tl.where(later, x, lane_least)
        lane_last = tl.where(later, begin + tl.arange(0, ROUND), lane_last)
    return tl.max(tl.where(lane_least == tl.min(lane_least, 0), lane_last, 0), 0)


@triton.jit(do_not_specialize=["vocab", "blocks"])
def finish_kernel(
    logits, temperature, top_p, min_p,  # as in `sample_triton`
    best, mass, moment, raw,  # [N, C], of `scan_kernel`
    kept,  # [N, C], of `race_kernel`, or None without filters
    score, chosen, least, last,  # [N, C], of either
    token, logprob, raw_logprob, entropy, last_kept,  # [N] out
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * row_stride
    t = tl.load(temperature + n)
    tops = load_blocks(best, n, blocks, -INFINITY, BLOCKS)
    top = tl.max(tops, 0)
    if is_valid(n, top, t, top_p, min_p):
        greedy, scale = scale_of(t)
        d, factor = rescale(tops, top, scale)
        masses = load_blocks(mass, n, blocks, 0.0, BLOCKS) * factor
        moments = load_blocks(moment, n, blocks, 0.0, BLOCKS) * factor + masses * d
        total = tl.sum(masses, 0)
        raw_total = total
        if scale != LOG2E:
            _, raw_factor = rescale(tops, top, LOG2E)
            raw_total = tl.sum(load_blocks(raw, n, blocks, 0.0, BLOCKS) * raw_factor, 0)

        scores = load_blocks(score, n, blocks, INFINITY, BLOCKS)
        bottoms = load_blocks(least, n, blocks, INFINITY, BLOCKS)
        if kept is not None:
            kept_total = tl.sum(load_blocks(kept, n, blocks, 0.0, BLOCKS), 0)
        else:
            kept_total = total
            scores = tl.where(greedy, tl.where(tops == top, 0.0, 1.0), scores * tl.exp2(-d))
        won = scores == tl.min(scores, 0)
        first = tl.min(tl.where(won, load_blocks(chosen, n, blocks, MAX_INDEX, BLOCKS), MAX_INDEX), 0)
        bottom = tl.min(bottoms, 0)
        last_of_all = tl.max(tl.where(bottoms == bottom, load_blocks(last, n, blocks, -1, BLOCKS), -1), 0)
        if kept is None:  # noqa: SIM102 (the first is decided when compiling)
            # A block judged by its own best token, beside which more have a weight than beside the row's.
            if tl.exp2((bottom - top) * scale) < TINY:
                last_of_all = last_drawn(row, top, scale, vocab, ROUND)
        below = tl.load(row + first).to(tl.float32) - top
        tl.store(token + n, first.to(tl.int64))
        tl.store(last_kept + n, tl.where(greedy, first, last_of_all).to(tl.int64))
        tl.store(logprob + n, tl.where(greedy, 0.0, tl.div_rn(below, t) - tl.log(kept_total)))
        tl.store(raw_logprob + n, below - tl.log(raw_total))
        tl.store(entropy + n, tl.where(greedy, 0.0, tl.log(total) - LN2 * (tl.sum(moments, 0) / total)))
    else:
        nan = float("nan")
        tl.store(token + n, tl.full((), -1, tl.int64))
        tl.store(last_kept + n, tl.full((), -1, tl.int64))
        tl.store(logprob + n, nan)
        tl.store(raw_logprob + n, nan)
        tl.store(entropy + n, nan)


def sample_triton(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32
    top_k: Tensor | None,  # [N] int32
    top_p: Tensor | None,  # [N] float32
    min_p: Tensor | None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    token, last_kept = torch.empty_like(seed), torch.empty_like(seed)
    logprob, raw_logprob, entropy = (torch.empty_like(temperature) for _ in range(3))
    if rows == 0:
        return token, logprob, raw_logprob, entropy, last_kept
    blocks = triton.cdiv(vocab, BLOCK)
    many = triton.next_power_of_2(blocks)
    room = triton.cdiv(rows * blocks, 4) * 4  # each begins at 16 bytes: elsewhere it would be another kernel to compile
    best, mass, moment, raw, kept, score, least = logits.new_empty((7, room), dtype=torch.float32)
    chosen, last = logits.new_empty((2, room), dtype=torch.int32)
    winners, size = (score, chosen, least, last), (logits.stride(0), vocab)
    plain = top_k is None and top_p is None and min_p is None
    scan_kernel[(rows, blocks)](
        logits, temperature, seed, step, best, mass, moment, raw, *winners, *size, BLOCK=BLOCK, RACE=plain, num_warps=4
    )
    if not plain:
        cut = cut_index = None
        if top_k is not None or top_p is not None:
            cut, cut_index = torch.empty_like(temperature), last.new_empty(rows)
            filters = (temperature, top_k, top_p, min_p)
            select_kernel[(rows,)](
                logits, *filters, best, mass, cut, cut_index, *size, blocks, BLOCKS=many, ROUND=ROUND, num_warps=8
            )
        race_kernel[(rows, blocks)](
            logits, temperature, min_p, seed, step, best, cut, cut_index, kept, *winners, *size,
            BLOCKS=many, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    found = (token, logprob, raw_logprob, entropy, last_kept)
    finish_kernel[(rows,)](
        logits, temperature, top_p, min_p, best, mass, moment, raw, None if plain else kept, *winners, *found, *size,
        blocks, BLOCKS=many, ROUND=ROUND, num_warps=4,
    )  # fmt: skip
    return token, logprob, raw_logprob, entropy, last_kept
