"""Value and derivatives of an objective on given log-probs: no autograd, no host synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from . import reference
from .fields import PolicyFields
from .objective import Objective, Spec


class Evaluation(NamedTuple):
    total: Tensor  # [], sum of the losses
    d_logprob: Tensor  # [M]
    d_entropy: Tensor | None  # [M]
    sums: Tensor  # [len(reference.SUMS)] fp64, what the metrics are made of


def evaluate(
    logprob: Tensor,  # [M] fp32 or fp64
    entropy: Tensor | None,  # [M]
    fields: PolicyFields,  # [M], aggregation folded in
    objective: Objective,
) -> Evaluation:
    """The objective on pairs that are whole paths, or any pairs where its scope is "token"."""
    if objective.ratio_level == "sequence":
        return _sequence_level(logprob, entropy, fields, objective)
    return _elements(logprob, entropy, fields, objective)


def _elements(logprob: Tensor, entropy: Tensor | None, fields: PolicyFields, objective: Objective) -> Evaluation:
    def same(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(logprob.dtype)

    table = {b: f for b, f in _TERMS.items() if b != "triton" or logprob.dtype == torch.float32}
    total, d_logprob, d_entropy, sums = dispatch.choose("policy_loss", table, logprob.device)(
        logprob,
        same(entropy),
        same(fields.adv_pos),
        same(fields.adv_neg),
        same(fields.weight),
        fields.mask,
        same(fields.old_logprob),
        same(fields.ref_logprob),
        same(fields.behaviour_logprob),
        objective.surrogate,
        objective.ratio_base == "self" or fields.old_logprob is None,
        objective.kl,
        Spec.of(objective),
    )
    return Evaluation(total, d_logprob, None if entropy is None else d_entropy, sums)


def _sequence_level(logprob: Tensor, entropy: Tensor | None, fields: PolicyFields, objective: Objective) -> Evaluation:
    """The ratio of a leaf acts on every token of its path, so leaves cannot be merged: two linear passes.

    The surrogate runs on leaves, with s = mean log-ratio of the path in the place of the log-prob and w_l len_l in the
    place of the weight; the gradient of a token is the sum over the leaves below it. KL and entropy stay with tokens.
    """
    paths = fields.paths
    if paths is None or paths.leaf_advantage is None or paths.leaf_weight is None:
        raise ValueError(
            "policy_loss: ratio_level 'sequence' needs one advantage and weight a sequence; "
            "give flat() an advantage [sequences] together with cu_seqlens."
        )
    d = torch.zeros_like(logprob)
    if fields.old_logprob is not None and objective.ratio_base == "old":
        d = logprob - fields.old_logprob.to(logprob.dtype)
    live = torch.ones_like(d, dtype=torch.bool) if fields.mask is None else fields.mask
    length = paths.leaf_length.to(logprob.dtype)
    mean = paths.sum(torch.where(live, d, 0)) / length.clamp(min=1)
    tokens = paths.leaf_weight.to(logprob.dtype) * length
    advantage = paths.leaf_advantage.to(logprob.dtype)
    zero = torch.zeros_like(tokens)
    leaves = PolicyFields(tokens * advantage.clamp(min=0), tokens * advantage.clamp(max=0), tokens, old_logprob=zero)
    of_leaves = _elements(mean, None, leaves, replace(objective, ratio_level="token", entropy_coef=0.0, kl_coef=0.0))
    nothing = torch.zeros_like(fields.adv_pos)
    of_tokens = _elements(logprob, entropy, replace(fields, adv_pos=nothing, adv_neg=nothing), objective)
    below = paths.spread(of_leaves.d_logprob / length.clamp(min=1))
    surrogate = reference.SUMS.index("entropy")  # sums before it are the surrogate's
    return Evaluation(
        of_leaves.total + of_tokens.total,
        torch.where(live, below, 0) + of_tokens.d_logprob,
        of_tokens.d_entropy,
        torch.cat([of_leaves.sums[:surrogate], of_tokens.sums[surrogate:]]),
    )


def _triton_terms(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from . import triton  # not at the top: triton need not be installed

    return triton.terms(*args)


_TERMS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "triton": _triton_terms,
    "cpu": reference.terms,
    "reference": reference.terms,
}
