"""The fused elementwise policy loss in Triton; the definition is `reference.terms`.

One pass: at most nine reads of 4 bytes an element, one or two writes. A program adds up its block and writes partial
sums of loss and metrics; a second, fixed-order sum over blocks finishes them. No atomics.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .objective import MAX_LOG_RATIO, Spec
from .reference import SUMS

BLOCK = 1024
_MAX = tl.constexpr(MAX_LOG_RATIO)


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
def _surrogate(lp, d, eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, SURROGATE: tl.constexpr):
    """The fields of `objective.Terms`, in their order."""
    r = tl.exp(_clamp(d, -_MAX, _MAX))
    dr = tl.where(tl.abs(d) <= _MAX, r, 0.0)
    low = 1 - eps_low
    high = 1 + eps_high
    zero = tl.zeros_like(r)
    one = zero + 1.0
    over = tl.where(r > high, 1.0, 0.0)
    under = tl.where(r < low, 1.0, 0.0)
    if SURROGATE == "ppo":
        floored = tl.where(r < low, low, r)
        beyond = tl.where(floored > clip_ratio_c, 1.0, 0.0)
        pos = -tl.where(r > high, high, r)
        neg = tl.where(floored > clip_ratio_c, clip_ratio_c, floored)
        d_pos = tl.where(r <= high, -dr, 0.0)
        d_neg = tl.where((r >= low) & (beyond == 0), dr, 0.0)
        return pos, neg, zero, d_pos, d_neg, zero, over, under, beyond
    elif SURROGATE == "cispo":
        w = _clamp(r, low, high)
        return -w * lp, w * lp, zero, -w, w, zero, over, under, zero
    elif SURROGATE == "sapo":
        p = tl.sigmoid(tau_pos * (r - 1))
        n = tl.sigmoid(tau_neg * (r - 1))
        d_pos = -4 * p * (1 - p) * dr
        d_neg = 4 * n * (1 - n) * dr
        return -4 / tau_pos * p, 4 / tau_neg * n, zero, d_pos, d_neg, zero, zero, zero, zero
    elif SURROGATE == "reinforce":
        return -lp, lp, zero, -one, one, zero, zero, zero, zero
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
    mask,  # [M] uint8
    old_logprob,
    ref_logprob,
    behaviour_logprob,
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
    kl_coef,
    entropy_coef,
    mismatch_cap,
    HAS_ENTROPY: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_BEHAVIOUR: tl.constexpr,
    RATIO_SELF: tl.constexpr,
    MISMATCH: tl.constexpr,
    SURROGATE: tl.constexpr,
    KL: tl.constexpr,
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
    old = lp
    if HAS_OLD:
        old = tl.load(old_logprob + i, mask=live, other=0.0)
    d = lp - old
    if RATIO_SELF:
        d = tl.zeros_like(lp)
    pos, neg, all_, d_pos, d_neg, d_all, over, under, beyond = _surrogate(
        lp, d, eps_low, eps_high, clip_ratio_c, tau_pos, tau_neg, SURROGATE
    )
    pg = s_pos * pos - s_neg * neg + s_one * all_
    grad = s_pos * d_pos - s_neg * d_neg + s_one * d_all

    zero = tl.zeros_like(lp)
    k3 = zero
    difference = zero
    known = zero
    is_weight = zero
    if HAS_BEHAVIOUR:
        sampled = tl.load(behaviour_logprob + i, mask=live, other=0.0)
        finite = (tl.abs(sampled) < float("inf")) & (sampled == sampled)
        x = _clamp(old - sampled, -20.0, 20.0)
        known = tl.where(finite, s_one, 0.0)
        k3 = tl.where(finite, known * (_expm1(x) - x), 0.0)
        difference = tl.where(finite, known * tl.abs(tl.exp(old) - tl.exp(sampled)), 0.0)
        if MISMATCH:
            is_weight = tl.exp(x)
            is_weight = tl.where(is_weight > mismatch_cap, mismatch_cap, is_weight)
            pg = is_weight * pg
            grad = is_weight * grad

    loss = pg
    kl = zero
    if HAS_REF:
        kl, d_kl = _kl(tl.load(ref_logprob + i, mask=live, other=0.0) - lp, KL)
        loss += s_one * kl_coef * kl
        grad += s_one * kl_coef * d_kl
    h = zero
    if HAS_ENTROPY:
        h = tl.load(entropy + i, mask=live, other=0.0)
        loss -= s_one * entropy_coef * h
        tl.store(d_entropy + i, -entropy_coef * s_one, mask=inside)
    tl.store(d_logprob + i, tl.where(live, grad, 0.0), mask=inside)

    size = s_pos - s_neg
    per_size = tl.where(size > 0, s_one / tl.where(size > 0, size, 1.0), 0.0)
    partial += block
    tl.store(partial, tl.sum(loss, 0))
    tl.store(partial + blocks, tl.sum(pg, 0))
    tl.store(partial + 2 * blocks, tl.sum(per_size * (s_pos * over - s_neg * under), 0))
    tl.store(partial + 3 * blocks, tl.sum(-per_size * s_neg * beyond, 0))
    tl.store(partial + 4 * blocks, tl.sum(s_one * (old - lp), 0))
    tl.store(partial + 5 * blocks, tl.sum(s_one * h, 0))
    tl.store(partial + 6 * blocks, tl.sum(s_one * kl, 0))
    tl.store(partial + 7 * blocks, tl.sum(k3, 0))
    tl.store(partial + 8 * blocks, tl.sum(difference, 0))
    tl.store(partial + 9 * blocks, tl.sum(s_one * is_weight, 0))
    tl.store(partial + 10 * blocks, tl.sum(known, 0))
    tl.store(partial + 11 * blocks, tl.sum(s_one, 0))


def terms(
    logprob: Tensor,  # [M] fp32
    entropy: Tensor | None,  # [M]
    adv_pos: Tensor,  # [M]
    adv_neg: Tensor,  # [M]
    weight: Tensor,  # [M]
    mask: Tensor | None,  # [M] bool
    old_logprob: Tensor | None,  # [M]
    ref_logprob: Tensor | None,  # [M]
    behaviour_logprob: Tensor | None,  # [M]
    surrogate: str,
    ratio_self: bool,
    kl: str,
    numbers: Sequence[float],  # a `Spec`
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.terms`."""
    M = len(logprob)
    blocks = triton.cdiv(M, BLOCK)
    spec = Spec(*numbers)
    d_logprob = torch.empty(M, dtype=logprob.dtype, device=logprob.device)
    d_entropy = d_logprob.new_empty(0 if entropy is None else M)
    partial = logprob.new_empty(1 + len(SUMS), blocks)

    def pointer(t: Tensor | None) -> Tensor:
        return d_logprob if t is None else t.contiguous()  # never read where absent

    if M:
        _terms[(blocks,)](
            logprob.contiguous(),
            pointer(entropy),
            adv_pos.contiguous(),
            adv_neg.contiguous(),
            weight.contiguous(),
            pointer(None if mask is None else mask.view(torch.uint8)),
            pointer(old_logprob),
            pointer(ref_logprob),
            pointer(behaviour_logprob),
            d_logprob,
            d_entropy,
            partial,
            M,
            blocks,
            *spec,
            HAS_ENTROPY=entropy is not None,
            HAS_MASK=mask is not None,
            HAS_OLD=old_logprob is not None,
            HAS_REF=ref_logprob is not None,
            HAS_BEHAVIOUR=behaviour_logprob is not None,
            RATIO_SELF=ratio_self,
            MISMATCH=spec.mismatch_cap > 0,
            SURROGATE=surrogate,
            KL=kl,
            BLOCK=BLOCK,
        )
    sums = partial.sum(1, dtype=torch.float64)
    return sums[0].to(logprob.dtype), d_logprob, d_entropy, sums[1:].clone()
