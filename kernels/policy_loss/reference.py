"""The definition of the policy loss on elements, in plain PyTorch; on a CPU it is also the fast one.

One pass over [M] elements: value, derivative by log-prob and by entropy, and the sums the metrics are made of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .surrogates import MAX_LOG_RATIO, SURROGATES, Pairs, Spec, kl_terms

# Sums over elements, weighted by S_1 (those of the mismatch by S_1 where a behaviour log-prob is known).
SUMS = (
    "pg_loss",
    "clipped",
    "clipped_lower",
    "ppo_kl",
    "entropy",
    "kl",
    "mismatch_k3",
    "mismatch_probability",
    "mismatch_weight",
    "mismatch_rejected",
    "behaviour_count",
    "count",
)


class Elements(NamedTuple):
    """Inputs of the elementwise loss, each [M] in one dtype, None where absent."""

    logprob: Tensor
    entropy: Tensor | None
    adv_pos: Tensor
    adv_neg: Tensor
    weight: Tensor
    all_weight: Tensor | None  # of g_all; None: `weight`
    mask: Tensor | None  # bool
    log_ratio: Tensor | None  # None: 0
    old_logprob: Tensor | None
    ref_logprob: Tensor | None
    behaviour_logprob: Tensor | None
    low: Tensor | None
    high: Tensor | None
    extra: Tensor | None
    pos_weight: Tensor | None
    neg_weight: Tensor | None


class Kind(NamedTuple):
    """What the elementwise kernels are compiled for."""

    surrogate: str
    kl: str
    kl_importance: bool
    mismatch: str  # "none", "truncate" or "mask", of tokens


def terms(x: Elements, kind: Kind, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(sum of the losses [], d/dlogprob [M], d/dentropy [M] or [0], sums [len(SUMS)] fp64)``."""
    logprob, weight = x.logprob, x.weight
    live = torch.ones_like(logprob, dtype=torch.bool) if x.mask is None else x.mask
    old = logprob if x.old_logprob is None else x.old_logprob
    zero = torch.zeros_like(logprob)
    d = zero if x.log_ratio is None else x.log_ratio
    g = SURROGATES[kind.surrogate](Pairs(logprob, d, x.low, x.high, x.extra), spec)
    of_all = weight if x.all_weight is None else x.all_weight
    pg = x.adv_pos * g.pos - x.adv_neg * g.neg + of_all * g.all
    d_logprob = x.adv_pos * g.d_pos - x.adv_neg * g.d_neg + of_all * g.d_all

    is_weight, rejected = zero, zero
    k3 = difference = known = zero
    if x.behaviour_logprob is not None:
        finite = x.behaviour_logprob.isfinite()
        behaviour = torch.where(finite, x.behaviour_logprob, old)
        gap = (old - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        known = weight * finite
        k3, difference = torch.expm1(gap) - gap, (old.exp() - behaviour.exp()).abs()
        if kind.mismatch != "none":
            is_weight = gap.exp()
            outside = (is_weight > spec.mismatch_cap) | (is_weight < spec.mismatch_low)
            if kind.mismatch == "mask":
                is_weight, rejected = torch.where(outside, 0, is_weight), outside.to(zero.dtype)
            else:
                is_weight = is_weight.clamp(spec.mismatch_low, spec.mismatch_cap)
            pg, d_logprob = is_weight * pg, is_weight * d_logprob

    loss, penalty = pg, zero
    if x.ref_logprob is not None:
        penalty, d_penalty = kl_terms(logprob, x.ref_logprob, kind.kl)
        if kind.kl_importance:
            r = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            inside = d.abs() <= MAX_LOG_RATIO
            penalty, d_penalty = r * penalty, r * d_penalty + torch.where(inside, r * penalty, 0)
        if spec.kl_coef:
            loss = loss + weight * spec.kl_coef * penalty
            d_logprob = d_logprob + weight * spec.kl_coef * d_penalty
    d_entropy = logprob.new_empty(0)
    if x.entropy is not None:
        d_entropy = torch.where(live, -spec.entropy_coef * weight, 0)
        if spec.entropy_coef:
            loss = loss - weight * spec.entropy_coef * x.entropy

    # A shared token counts as clipped for the leaves of the side that is.
    if x.pos_weight is None or x.neg_weight is None:
        size = x.adv_pos - x.adv_neg
        of_pos, of_neg = (weight * torch.where(size > 0, side / size, 0) for side in (x.adv_pos, -x.adv_neg))
    else:
        of_pos, of_neg = torch.where(x.adv_pos > 0, x.pos_weight, 0), torch.where(x.adv_neg < 0, x.neg_weight, 0)

    rows = {
        "pg_loss": pg,
        "clipped": of_pos * g.clipped_pos + of_neg * g.clipped_neg,
        "clipped_lower": of_neg * g.clipped_lower,
        "ppo_kl": weight * (old - logprob),
        "entropy": zero if x.entropy is None else weight * x.entropy,
        "kl": weight * penalty,
        "mismatch_k3": torch.where(known != 0, known * k3, 0),
        "mismatch_probability": torch.where(known != 0, known * difference, 0),
        "mismatch_weight": weight * is_weight,
        "mismatch_rejected": weight * rejected,
        "behaviour_count": known,
        "count": weight,
    }
    sums = torch.stack([torch.where(live, rows[name], 0).sum(dtype=torch.float64) for name in SUMS])
    total = torch.where(live, loss, 0).sum(dtype=torch.float64).to(logprob.dtype)
    return total, torch.where(live, d_logprob, 0), d_entropy, sums
