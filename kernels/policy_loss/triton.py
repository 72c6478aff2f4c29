"""The fused elementwise policy loss in Triton; the definition is `reference.terms`.

One pass: at most fourteen reads of 4 bytes an element, one or two writes. A program adds up its block and writes
partial sums of loss and metrics; a second, fixed-order sum over blocks finishes them. No atomics.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import SUMS, Elements, Kind
from .surrogates import MAX_LOG_RATIO, TINY, Spec

BLOCK = 1024
_MAX = tl.constexpr(MAX_LOG_RATIO)
_TINY = tl.constexpr(TINY)


@triton.jit
def _expm1(x):
    """e^x - 1 without cancellation for small x, where the series to x^7 is exact to rounding."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1)


@triton.jit
def _clamp(x, low, high):
    """NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _surrogate(
    lp, d, low, high, extra, eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, beta, SURROGATE: tl.constexpr
):
    """The fields of `surrogates.Terms`, in their order."""
    r = tl.exp(_clamp(d, -_MAX, _MAX))
    dr = tl.where(tl.abs(d) <= _MAX, r, 0.0)
    zero = tl.zeros_like(r)
    one = zero + 1.0
    over = tl.where(r > high, 1.0, 0.0)
    under = tl.where(r < low, 1.0, 0.0)
    if SURROGATE == "ppo":
        floored = tl.where(r < low, low, r)
        beyond = tl.where(floored > clip_ratio_c, 1.0, 0.0)
        pos = -tl.where(r > high, high, r)
        neg = tl.where(floored > clip_ratio_c, clip_ratio_c, floored)
        d_pos = tl.where(r > high, 0.0, -dr)
        d_neg = tl.where((r < low) | (beyond != 0), 0.0, dr)
        return pos, neg, zero, d_pos, d_neg, zero, over, under, beyond
    elif SURROGATE == "unclipped":
        return -r, r, zero, -dr, dr, zero, zero, zero, zero
    elif SURROGATE == "cispo":
        w = tl.where(r > high, high, tl.where(r < low, low, r))
        return -w * lp, w * lp, zero, -w, w, zero, over, under, zero
    elif SURROGATE == "sapo":
        p = tl.sigmoid(tau_pos * (r - 1))
        n = tl.sigmoid(tau_neg * (r - 1))
        d_pos = -4 * p * (1 - p) * dr
        d_neg = 4 * n * (1 - n) * dr
        return -4 / tau_pos * p, 4 / tau_neg * n, zero, d_pos, d_neg, zero, zero, zero, zero
    elif SURROGATE == "reinforce":
        return -lp, lp, zero, -one, one, zero, zero, zero, zero
    elif (SURROGATE == "dppo_tv") | (SURROGATE == "dppo_kl"):
        w = tl.where(r > clip_ratio_c, clip_ratio_c, r)
        p = tl.exp(lp)
        q = tl.exp(lp - d)
        if SURROGATE == "dppo_tv":
            bad_pos = p - q > eps_high
            bad_neg = p - q < -eps_low
        else:
            divergence = -q * d + (1 - q) * tl.log((1 - q + _TINY) / (1 - p + _TINY))
            bad_pos = (divergence > eps_high) & (p > q)
            bad_neg = (divergence > eps_low) & (p < q)
        pos = tl.where(bad_pos, 0.0, w)
        neg = tl.where(bad_neg, 0.0, w)
        clipped_pos = tl.where(bad_pos, 1.0, 0.0)
        clipped_neg = tl.where(bad_neg, 1.0, 0.0)
        return -pos * lp, neg * lp, zero, -pos, neg, zero, clipped_pos, clipped_neg, zero
    elif SURROGATE == "dro":
        return -lp, lp, 0.5 * beta * d * d, -one, one, beta * d, zero, zero, zero
    elif SURROGATE == "kl_cov":
        sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
        return -r, r, beta * tl.abs(d), -dr, dr, beta * sign, zero, zero, zero
    elif SURROGATE == "nft":
        q = tl.where(extra > 1 - 1e-6, 1 - 1e-6, extra)
        rest = (1 - q * r) / (1 - q)
        floor = tl.where(rest < beta, 1.0, 0.0)
        inside = tl.where(rest < beta, beta, rest)
        d_neg = tl.where(rest < beta, 0.0, q * dr / ((1 - q) * inside))
        return -d, -tl.log(inside), zero, -one, d_neg, zero, zero, floor, zero
    elif SURROGATE == "distill_reverse":
        return zero, zero, (lp - extra) * lp, zero, zero, lp - extra, zero, zero, zero
    elif SURROGATE == "distill_forward":
        w = tl.exp(_clamp(extra - lp, -_MAX, _MAX))
        w = tl.where(w > clip_ratio_c, clip_ratio_c, w)
        return zero, zero, -w * lp, zero, zero, -w, zero, zero, zero
    else:
        tl.static_assert(SURROGATE == "nll", "no such surrogate")
        return zero, zero, -lp, zero, zero, -one, zero, zero, zero


@triton.jit
def _kl(x, KL: tl.constexpr):
    """Estimate and derivative by the log-prob; x = ref - logprob."""
    if KL == "k1":
        return -x, tl.zeros_like(x) + 1.0
    elif KL == "abs":
        return tl.abs(x), tl.where(x > 0, -1.0, tl.where(x < 0, 1.0, 0.0))
    elif KL == "k2":
        return 0.5 * x * x, -x
    else:
        tl.static_assert((KL == "k3") | (KL == "low_var"), "no such KL estimator")
        inside = tl.abs(x) <= _MAX
        x = _clamp(x, -_MAX, _MAX)
        growth = _expm1(x)
        k3 = growth - x
        derivative = tl.where(inside, -growth, 0.0)
        if KL == "low_var":
            derivative = tl.where(k3 <= 10.0, derivative, 0.0)
            k3 = tl.where(k3 > 10.0, 10.0, k3)
        return k3, derivative


@triton.jit(do_not_specialize=["M", "blocks"])
def _terms(
    logprob,  # [M] fp32, like all but mask
    entropy,
    adv_pos,
    adv_neg,
    weight,
    all_weight,
    mask,  # [M] uint8
    log_ratio,
    old_logprob,
    ref_logprob,
    behaviour_logprob,
    clip_low,
    clip_high,
    extra,
    pos_weight,
    neg_weight,
    d_logprob,
    d_entropy,
    partial,  # [1 + len(SUMS), blocks]: the loss, then SUMS
    M,
    blocks,
    eps_low,
    eps_high,
    clip_ratio_c,
    tau_pos,
    tau_neg,
    beta,
    kl_coef,
    entropy_coef,
    mismatch_low,
    mismatch_cap,
    HAS_ENTROPY: tl.constexpr,
    HAS_ALL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_RATIO: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_BEHAVIOUR: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_SIDES: tl.constexpr,
    SURROGATE: tl.constexpr,
    KL: tl.constexpr,
    STRAIGHT_THROUGH: tl.constexpr,
    KL_IMPORTANCE: tl.constexpr,
    MISMATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < M
    live = inside
    if HAS_MASK:
        live = live & (tl.load(mask + i, mask=inside, other=0) != 0)
    # Elements that are not live are never read: whatever stands there cannot reach the sums.
    lp = tl.load(logprob + i, mask=live, other=0.0)
    s_pos = tl.load(adv_pos + i, mask=live, other=0.0)
    s_neg = tl.load(adv_neg + i, mask=live, other=0.0)
    s_one = tl.load(weight + i, mask=live, other=0.0)
    zero = tl.zeros_like(lp)
    s_all = s_one
    if HAS_ALL:
        s_all = tl.load(all_weight + i, mask=live, other=0.0)
    old = lp
    if HAS_OLD:
        old = tl.load(old_logprob + i, mask=live, other=0.0)
    d = zero
    if HAS_RATIO:
        d = tl.load(log_ratio + i, mask=live, other=0.0)
    low = zero + (1 - eps_low)
    if HAS_LOW:
        low = tl.load(clip_low + i, mask=live, other=0.0)
    high = zero + (1 + eps_high)
    if HAS_HIGH:
        high = tl.load(clip_high + i, mask=live, other=1.0)
    more = zero
    if HAS_EXTRA:
        more = tl.load(extra + i, mask=live, other=0.0)
    pos, neg, all_, d_pos, d_neg, d_all, over, under, beyond = _surrogate(
        lp, d, low, high, more, eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, beta, SURROGATE
    )
    pg = s_pos * pos - s_neg * neg + s_all * all_
    grad = s_pos * d_pos - s_neg * d_neg + s_all * d_all

    k3 = zero
    difference = zero
    known = zero
    is_weight = zero
    rejected = zero
    if HAS_BEHAVIOUR:
        sampled = tl.load(behaviour_logprob + i, mask=live, other=0.0)
        finite = (tl.abs(sampled) < float("inf")) & (sampled == sampled)
        sampled = tl.where(finite, sampled, old)
        x = _clamp(old - sampled, -_MAX, _MAX)
        known = tl.where(finite, s_one, 0.0)
        k3 = known * (_expm1(x) - x)
        difference = known * tl.abs(tl.exp(old) - tl.exp(sampled))
        if MISMATCH != "none":
            is_weight = tl.exp(x)
            outside = (is_weight > mismatch_cap) | (is_weight < mismatch_low)
            if MISMATCH == "mask":
                is_weight = tl.where(outside, 0.0, is_weight)
                rejected = tl.where(outside, 1.0, 0.0)
            else:
                is_weight = _clamp(is_weight, mismatch_low, mismatch_cap)
            pg = is_weight * pg
            grad = is_weight * grad

    loss = pg
    kl = zero
    if HAS_REF:
        gap = tl.load(ref_logprob + i, mask=live, other=0.0) - lp
        kl, d_kl = _kl(gap, KL)
        if STRAIGHT_THROUGH:
            d_kl = -gap
        if KL_IMPORTANCE:
            r = tl.exp(_clamp(d, -_MAX, _MAX))
            kl = r * kl
            d_kl = r * d_kl + tl.where(tl.abs(d) <= _MAX, kl, 0.0)
        loss += s_one * kl_coef * kl
        grad += s_one * kl_coef * d_kl
    h = zero
    if HAS_ENTROPY:
        h = tl.load(entropy + i, mask=live, other=0.0)
        loss -= s_one * entropy_coef * h
        tl.store(d_entropy + i, -entropy_coef * s_one, mask=inside)
    tl.store(d_logprob + i, tl.where(live, grad, 0.0), mask=inside)

    if HAS_SIDES:
        w_pos = tl.where(s_pos > 0, tl.load(pos_weight + i, mask=live, other=0.0), 0.0)
        w_neg = tl.where(s_neg < 0, tl.load(neg_weight + i, mask=live, other=0.0), 0.0)
    else:
        size = tl.where(s_pos - s_neg > 0, s_pos - s_neg, 1.0)
        w_pos = s_one * (s_pos / size)
        w_neg = s_one * (-s_neg / size)
    partial += block
    tl.store(partial, tl.sum(loss, 0))
    tl.store(partial + blocks, tl.sum(pg, 0))
    tl.store(partial + 2 * blocks, tl.sum(w_pos * over + w_neg * under, 0))
    tl.store(partial + 3 * blocks, tl.sum(w_neg * beyond, 0))
    tl.store(partial + 4 * blocks, tl.sum(s_one * (old - lp), 0))
    tl.store(partial + 5 * blocks, tl.sum(s_one * h, 0))
    tl.store(partial + 6 * blocks, tl.sum(s_one * kl, 0))
    tl.store(partial + 7 * blocks, tl.sum(k3, 0))
    tl.store(partial + 8 * blocks, tl.sum(difference, 0))
    tl.store(partial + 9 * blocks, tl.sum(s_one * is_weight, 0))
    tl.store(partial + 10 * blocks, tl.sum(s_one * rejected, 0))
    tl.store(partial + 11 * blocks, tl.sum(known, 0))
    tl.store(partial + 12 * blocks, tl.sum(s_one, 0))


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.terms`, in fp32."""
    M = len(x.logprob)
    blocks = triton.cdiv(M, BLOCK)
    d_logprob = torch.empty_like(x.logprob, memory_format=torch.contiguous_format)
    d_entropy = d_logprob.new_empty(0 if x.entropy is None else M)
    partial = d_logprob.new_empty(1 + len(SUMS), blocks)

    def pointer(t: Tensor | None) -> Tensor:
        return d_logprob if t is None else t.contiguous()  # never read where absent

    if M:
        _terms[(blocks,)](
            *(pointer(t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t) for t in x),
            d_logprob,
            d_entropy,
            partial,
            M,
            blocks,
            *spec,
            HAS_ENTROPY=x.entropy is not None,
            HAS_ALL=x.all_weight is not None,
            HAS_MASK=x.mask is not None,
            HAS_RATIO=x.log_ratio is not None,
            HAS_OLD=x.old_logprob is not None,
            HAS_REF=x.ref_logprob is not None,
            HAS_BEHAVIOUR=x.behaviour_logprob is not None,
            HAS_LOW=x.low is not None,
            HAS_HIGH=x.high is not None,
            HAS_EXTRA=x.extra is not None,
            HAS_SIDES=x.pos_weight is not None,
            SURROGATE=kind.surrogate,
            KL=kind.kl.removesuffix("+"),
            STRAIGHT_THROUGH=kind.kl.endswith("+"),
            KL_IMPORTANCE=kind.kl_importance,
            MISMATCH=kind.mismatch,
            BLOCK=BLOCK,
        )
    sums = partial.sum(1, dtype=torch.float64)
    return sums[0].to(d_logprob.dtype), d_logprob, d_entropy, sums[1:].clone()
