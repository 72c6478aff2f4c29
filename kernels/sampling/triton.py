"""Triton backend of :func:`sample_tokens`: one program a row, no sort, no [N, V] temporary.

A program reads its row a few times over: a pass for the maximum, one for the softmax sums, one for the draw, and with
top-k or top-p a bisection on the value of the last kept logit, at most 32 passes each. A row of a few hundred KB stays
in L2, so those passes cost L2 bandwidth, not memory bandwidth. Order of the tokens, masses and noise are those of
:mod:`.reference`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # tokens a pass handles at once; part of the summation order, so not tuned by shape


@triton.jit
def ordered_bits(bits):
    """Float bit patterns as int32 in the floats' order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(value):
    return ordered_bits(value.to(tl.int32, bitcast=True))


@triton.jit
def value_of(key):
    return ordered_bits(key).to(tl.float32, bitcast=True)


@triton.jit
def load_block(row, begin, vocab, BLOCK: tl.constexpr):
    index = begin + tl.arange(0, BLOCK)
    return tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def softmax_sums(row, best, scale, vocab, BLOCK: tl.constexpr):
    """Sum of w = exp((x - best) * scale) and of w log w."""
    mass = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        z = tl.maximum((load_block(row, begin, vocab, BLOCK) - best) * scale, -1000.0)  # 0 * -inf would be NaN
        w = tl.exp(z)
        mass += w
        moment += w * z
    return tl.sum(mass, 0), tl.sum(moment, 0)


@triton.jit
def above(row, best, scale, value, vocab, BLOCK: tl.constexpr):
    """Number and mass of the tokens whose logit exceeds ``value``."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        x = load_block(row, begin, vocab, BLOCK)
        count += (x > value).to(tl.int32)
        mass += tl.where(x > value, tl.exp((x - best) * scale), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def bisect(row, best, scale, lo_value, k, limit, vocab, BLOCK: tl.constexpr):
    """The smallest logit in [lo_value, best] with less than ``k`` tokens and less than ``limit`` mass above it."""
    lo = key_of(lo_value)
    hi = key_of(best)
    while lo < hi:
        mid = (lo & hi) + ((lo ^ hi) >> 1)
        count, mass = above(row, best, scale, value_of(mid), vocab, BLOCK)
        holds = (count < k) & (mass < limit)
        hi = tl.where(holds, mid, hi)
        lo = tl.where(holds, lo, mid + 1)
    return value_of(hi)


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
    """E = -log(1 - t). Below 1/64 by its series: 1 - t would round t away."""
    series = t + t * t * (t * (t * 0.25 + 0.33333333) + 0.5)
    return tl.where(t < 0.015625, series, -tl.log(1.0 - t))


@triton.jit(do_not_specialize=["row_stride", "vocab"])
def sample_kernel(
    logits,  # [N, V], rows row_stride apart
    temperature,  # [N] float32
    top_k,  # [N] int32 or None
    top_p,  # [N] float32 or None
    min_p,  # [N] float32 or None
    seed,  # [N] int64
    step,  # [N] int64
    token,  # [N] int64, out
    logprob,  # [N] float32, out
    raw_logprob,  # [N] float32, out
    entropy,  # [N] float32, out
    last_kept,  # [N] int64, out
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * row_stride
    t = tl.load(temperature + n)
    valid = (t >= 0) & (t < float("inf"))
    least_weight = 0.0
    p = 1.0
    k = vocab
    if min_p is not None:
        least_weight = tl.load(min_p + n)
        valid &= least_weight >= 0
        least_weight = tl.minimum(least_weight, 1.0)  # the best token, of weight 1, always stays
    if top_p is not None:
        p = tl.load(top_p + n)
        valid &= p >= 0
    if top_k is not None:
        k = tl.load(top_k + n)
        k = tl.where(k < 1, vocab, k)

    lane_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_bad = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        x = load_block(row, begin, vocab, BLOCK)
        good = x < float("inf")  # neither NaN nor +inf
        lane_best = tl.maximum(lane_best, tl.where(good, x, float("-inf")))
        lane_bad |= (~good).to(tl.int32)
    best = tl.max(lane_best, 0)
    valid &= (best > float("-inf")) & (tl.max(lane_bad, 0) == 0)
    if not valid:
        nan = float("nan")
        tl.store(token + n, tl.full((), -1, tl.int64))
        tl.store(last_kept + n, tl.full((), -1, tl.int64))
        tl.store(logprob + n, nan)
        tl.store(raw_logprob + n, nan)
        tl.store(entropy + n, nan)
    else:
        greedy = t < 1.1754943508222875e-38
        scale = tl.div_rn(1.0, tl.where(greedy, 1.0, t))
        mass, moment = softmax_sums(row, best, scale, vocab, BLOCK)
        raw_mass = mass
        if scale != 1.0:
            raw_mass, _ = softmax_sums(row, best, 1.0, vocab, BLOCK)

        # Top-k and top-p keep the logits above `last` and, by index, the first `ties` of those equal to it.
        last = float("-inf")
        ties = vocab
        kept_mass = mass
        if (k < vocab) & (not greedy):
            last = bisect(row, best, scale, last, k, float("inf"), vocab, BLOCK)
            count, over = above(row, best, scale, last, vocab, BLOCK)
            ties = k - count
            kept_mass = over + ties * tl.exp((last - best) * scale)
        if (p < 1.0) & (not greedy):
            limit = p * kept_mass
            k_last = last
            last = bisect(row, best, scale, tl.maximum(last, best - 104.0 * t), vocab + 1, limit, vocab, BLOCK)
            _, over = above(row, best, scale, last, vocab, BLOCK)
            missing = tl.ceil(tl.div_rn(limit - over, tl.exp((last - best) * scale)))
            p_ties = tl.maximum(tl.minimum(missing, vocab.to(tl.float32)), 1.0).to(tl.int32)
            ties = tl.where(last == k_last, tl.minimum(ties, p_ties), p_ties)

        # The race: the largest w / E over the kept tokens, the lowest index among equals.
        row_seed = tl.load(seed + n)
        row_step = tl.load(step + n)
        lane_mass = tl.zeros((BLOCK,), tl.float32)
        lane_score = tl.full((BLOCK,), -1.0, tl.float32)
        lane_index = tl.zeros((BLOCK,), tl.int32)
        lane_least = tl.full((BLOCK,), float("inf"), tl.float32)
        lane_last = tl.zeros((BLOCK,), tl.int32)
        seen = 0  # tokens equal to `last` so far
        for begin in range(0, vocab, BLOCK):
            x = load_block(row, begin, vocab, BLOCK)
            w = tl.exp((x - best) * scale)
            tied = (x == last).to(tl.int32)
            kept = (x > last) | ((tied == 1) & (seen + tl.cumsum(tied, 0) <= ties))
            seen += tl.sum(tied, 0)
            w = tl.where(kept & (w >= least_weight), w, 0.0)
            index = begin + tl.arange(0, BLOCK)
            later = (w >= 1.1754943508222875e-38) & (x <= lane_least)
            lane_least = tl.where(later, x, lane_least)
            lane_last = tl.where(later, index, lane_last)
            score = w / arrival(uniforms(row_seed, row_step, begin, BLOCK))
            score = tl.where(greedy, (x == best).to(tl.float32), score)
            lane_index = tl.where(score > lane_score, index, lane_index)
            lane_score = tl.maximum(score, lane_score)
            lane_mass += w
        score = tl.max(lane_score, 0)
        chosen = tl.min(tl.where(lane_score == score, lane_index, vocab), 0)
        below = tl.load(row + chosen).to(tl.float32) - best
        least = tl.min(lane_least, 0)
        last_of_all = tl.max(tl.where(lane_least == least, lane_last, 0), 0)
        tl.store(token + n, chosen.to(tl.int64))
        tl.store(last_kept + n, tl.where(greedy, chosen, last_of_all).to(tl.int64))
        tl.store(logprob + n, tl.where(greedy, 0.0, below * scale - tl.log(tl.sum(lane_mass, 0))))
        tl.store(raw_logprob + n, below - tl.log(raw_mass))
        tl.store(entropy + n, tl.where(greedy, 0.0, tl.log(mass) - moment / mass))


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
    if rows:
        given = (logits, temperature, top_k, top_p, min_p, seed, step)
        found = (token, logprob, raw_logprob, entropy, last_kept)
        sample_kernel[(rows,)](*given, *found, logits.stride(0), vocab, BLOCK=BLOCK, num_warps=8)
    return token, logprob, raw_logprob, entropy, last_kept
