"""The definition of the policy loss on elements, in plain PyTorch; on a CPU it is also the fast one.

One pass over [M] elements: value, derivative by log-prob and by entropy, and the sums the metrics are made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .objective import SURROGATES, Spec, Terms, kl_terms

# Sums over elements, weighted by S_1 (the last but one by S_1 where a behaviour log-prob is known).
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
    "behaviour_count",
    "count",
)


def terms(
    logprob: Tensor,  # [M] fp32 or fp64
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
    """``(sum of the losses [], d/dlogprob [M], d/dentropy [M] or [0], sums [len(SUMS)] fp64)``."""
    spec = Spec(*numbers)
    live = torch.ones_like(logprob, dtype=torch.bool) if mask is None else mask
    old = logprob if old_logprob is None else old_logprob
    zero = torch.zeros_like(logprob)
    d = zero if ratio_self else logprob - old
    g: Terms = SURROGATES[surrogate](logprob, d, spec)
    pg = adv_pos * g.pos - adv_neg * g.neg + weight * g.all
    d_logprob = adv_pos * g.d_pos - adv_neg * g.d_neg + weight * g.d_all

    is_weight = zero
    k3 = difference = known = zero
    if behaviour_logprob is not None:
        x = (old - behaviour_logprob).clamp(-20, 20)
        known = weight * behaviour_logprob.isfinite()
        k3, difference = torch.expm1(x) - x, (old.exp() - behaviour_logprob.exp()).abs()
        if spec.mismatch_cap:
            is_weight = x.exp().clamp(max=spec.mismatch_cap)
            pg, d_logprob = is_weight * pg, is_weight * d_logprob

    loss, penalty = pg, zero
    if ref_logprob is not None:
        penalty, d_penalty = kl_terms(logprob, ref_logprob, kl)
        if spec.kl_coef:
            loss = loss + weight * spec.kl_coef * penalty
            d_logprob = d_logprob + weight * spec.kl_coef * d_penalty
    d_entropy = logprob.new_empty(0)
    if entropy is not None:
        d_entropy = torch.where(live, -spec.entropy_coef * weight, 0)
        if spec.entropy_coef:
            loss = loss - weight * spec.entropy_coef * entropy

    # A shared token counts as clipped in the share that its clipped side has of the advantages through it.
    size = adv_pos - adv_neg
    per_size = torch.where(size > 0, weight / size, 0)
    rows = {
        "pg_loss": pg,
        "clipped": per_size * (adv_pos * g.clipped_pos - adv_neg * g.clipped_neg),
        "clipped_lower": per_size * -adv_neg * g.clipped_lower,
        "ppo_kl": weight * (old - logprob),
        "entropy": zero if entropy is None else weight * entropy,
        "kl": weight * penalty,
        "mismatch_k3": torch.where(known != 0, known * k3, 0),
        "mismatch_probability": torch.where(known != 0, known * difference, 0),
        "mismatch_weight": weight * is_weight,
        "behaviour_count": known,
        "count": weight,
    }
    sums = torch.stack([torch.where(live, rows[name], 0).sum(dtype=torch.float64) for name in SUMS])
    total = torch.where(live, loss, 0).sum(dtype=torch.float64).to(logprob.dtype)
    return total, torch.where(live, d_logprob, 0), d_entropy, sums
