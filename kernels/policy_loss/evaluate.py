"""Value and derivatives of an objective on given log-probs: no autograd, no host synchronisation.

Rules that look beyond a single token run first: they become constants of single tokens (choices from the batch, weights
of paths) and averaged ratios. Then one elementwise kernel computes the loss, and the targets over which a ratio was
averaged get their share of its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from . import elements, paths
from .elements import SUMS, Elements, Kind
from .elementwise import MAX_LOG_RATIO
from .fields import PolicyFields
from .objective import Objective
from .rules import Side, Targets
from .subsets import live_of, only, top_share, weighed
from .surrogates import Spec

SURROGATE_SUMS = ("pg_loss", "clipped", "clipped_lower", "mismatch_weight", "mismatch_rejected")


class Evaluation(NamedTuple):
    total: Tensor  # [], sum of the losses
    d_logprob: Tensor  # [M]
    d_entropy: Tensor | None  # [M]
    sums: Tensor  # [len(SUMS)] fp64, which the metrics are made of


def evaluate(
    logprob: Tensor,  # [M] fp32 or fp64
    entropy: Tensor | None,  # [M]
    fields: PolicyFields,  # [M], aggregation folded in
    objective: Objective,
) -> Evaluation:
    """Evaluate the objective on targets that are whole paths, or on any targets if its scope is "token"."""
    fields = fields.to(logprob.dtype)
    if len(logprob) and paths.differs_within_leaves(fields, objective):
        flat, target, counts = paths.unfolded(fields)
        of_pairs = evaluate(logprob[target], None if entropy is None else entropy[target], flat, objective)

        def folded(values: Tensor) -> Tensor:  # [P] -> [M], in a fixed order
            values = torch.where(counts, values, 0)
            return values.new_zeros(len(logprob)).index_put((target,), values, accumulate=True)

        d_entropy = None if of_pairs.d_entropy is None else folded(of_pairs.d_entropy)
        return Evaluation(of_pairs.total, folded(of_pairs.d_logprob), d_entropy, of_pairs.sums)
    if objective.ratio_base in ("proximal", "current"):
        fields = replace(fields, old_logprob=fields.proximal_logprob if objective.ratio_base == "proximal" else None)
    entropy = None if entropy is None else entropy.to(logprob.dtype)
    d = torch.zeros_like(logprob)
    if fields.old_logprob is not None and objective.ratio_base != "self":
        d = logprob - fields.old_logprob
    everywhere = fields  # KL and entropy terms are for every token, whichever are chosen for the surrogate
    fields = _chosen(logprob, entropy, d, fields, objective)
    fields = paths.apply_leaf_weights(logprob, d, fields, objective)
    if fields.token_weight is not None:
        fields = weighed(fields, fields.token_weight)
    if objective.pos_weight != 1 or objective.neg_weight != 1:
        fields = _weighted_by_sign(fields, objective.pos_weight, objective.neg_weight)
    if objective.ratio_level == "token":
        return _elements(logprob, entropy, d, fields, objective)
    over = paths.averaging(fields, objective)
    of_tokens = replace(objective, surrogate=objective.elementwise, ratio_level="token")
    surrogate = replace(of_tokens, kl_coef=0.0, entropy_coef=0.0)
    nothing = torch.zeros_like(fields.adv_pos)
    tokens = replace(everywhere, adv_pos=nothing, adv_neg=nothing, all_weight=nothing)
    result = _elements(logprob, entropy, d, tokens, replace(of_tokens, mismatch="none"))
    total, d_logprob, sums = result.total, result.d_logprob, result.sums
    chosen = torch.zeros_like(sums, dtype=torch.bool)
    for name in SURROGATE_SUMS:
        chosen[SUMS.index(name)] = True
    sums = torch.where(chosen, 0, sums)
    for side in _sides(logprob, d, over.fields, objective):
        mean = over.mean(side.log_ratio)
        scored = logprob if len(mean) == len(logprob) else mean
        part = _elements(scored, None, mean, side.fields, surrogate)
        total = total + part.total
        d_logprob = d_logprob + torch.where(side.inside, over.back(part.d_logprob), 0)
        sums = sums + torch.where(chosen, part.sums, 0)
    return Evaluation(total, d_logprob, result.d_entropy, sums)


def _chosen(
    logprob: Tensor,  # [M]
    entropy: Tensor | None,  # [M]
    d: Tensor,  # [M]
    fields: PolicyFields,
    objective: Objective,
) -> PolicyFields:
    """Return fields in which a choice of tokens from the whole batch is turned into weights."""
    if not len(logprob):
        return fields
    if objective.entropy_share < 1:
        assert entropy is not None
        fields = only(fields, top_share(entropy, live_of(fields), objective.entropy_share))
    if objective.rule is not None and objective.rule.kind == "token_choice":
        chosen: PolicyFields = objective.rule.function(Targets(logprob, d, fields), objective.rule_options)
        return chosen
    return fields


def _weighted_by_sign(fields: PolicyFields, pos: float, neg: float) -> PolicyFields:
    index = fields.paths
    if index is not None and index.leaf_advantage is not None:
        advantage = index.leaf_advantage
        index = replace(index, leaf_advantage=torch.where(advantage > 0, advantage * pos, advantage * neg))
    return replace(fields, adv_pos=fields.adv_pos * pos, adv_neg=fields.adv_neg * neg, paths=index)


def _sides(logprob: Tensor, d: Tensor, fields: PolicyFields, objective: Objective) -> Iterable[Side]:
    """Return the parts of the loss whose log-ratios are averaged: those of a path_ratio rule, or one of all."""
    if objective.rule is not None and objective.rule.kind == "path_ratio":
        sides: Iterable[Side] = objective.rule.function(Targets(logprob, d, fields), objective.rule_options)
        return sides
    return [Side(fields, d, torch.ones_like(d, dtype=torch.bool))]


def _elements(
    logprob: Tensor, entropy: Tensor | None, d: Tensor, fields: PolicyFields, objective: Objective
) -> Evaluation:
    low, high = fields.clip_low, fields.clip_high
    if objective.dynamic_clip and fields.old_logprob is not None:
        low, high = dynamic_bounds(fields.old_logprob, objective.eps_low, objective.eps_high)
        high = high.clamp(max=objective.dynamic_cap)
    extra = objective.formula.extra
    x = Elements(
        logprob=logprob,
        adv_pos=fields.adv_pos,
        adv_neg=fields.adv_neg,
        weight=fields.weight,
        all_weight=fields.all_weight,
        log_ratio=d,
        low=low,
        high=high,
        extra=None if extra is None else getattr(fields, extra),
        old_logprob=fields.old_logprob,
        ref_logprob=fields.ref_logprob,
        behaviour_logprob=fields.behaviour_logprob,
        entropy=entropy,
        pos_weight=fields.pos_weight,
        neg_weight=fields.neg_weight,
        mask=fields.mask,
    )
    kind = Kind(objective.elementwise, objective.kl, objective.kl_importance, objective.token_mismatch)
    fits = logprob.dtype == torch.float32
    unfit = {} if fits else {"triton": "its kernel computes in fp32, and the log-probs are fp64"}
    run = dispatch.choose("policy_loss", _TERMS, logprob.device, unfit)
    total, d_logprob, d_entropy, sums = run(x, kind, _spec(objective))
    return Evaluation(total, d_logprob, None if entropy is None else d_entropy, sums)


def _spec(objective: Objective) -> Spec:
    return Spec(
        objective.eps_low,
        objective.eps_high,
        objective.formula.cap if objective.clip_ratio_c is None else objective.clip_ratio_c,
        objective.tau_pos,
        objective.tau_neg,
        objective.beta,
        objective.kl_coef or None,
        objective.entropy_coef or None,
        objective.mismatch_low,
        objective.mismatch_cap,
    )


def dynamic_bounds(old_logprob: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Return bounds of the ratio, ``[M]`` each, at which ``|r - 1| p = eps``, p = r q: wide for unlikely tokens (DCPO).

    high = (1 + sqrt(1 + 4 eps_high / q)) / 2, low = (1 + sqrt(max(1 - 4 eps_low / q, 0))) / 2, q = exp(old_logprob).
    """
    inverse = (-old_logprob).clamp(max=MAX_LOG_RATIO).exp()
    low = 0.5 + 0.5 * (1 - 4 * eps_low * inverse).clamp(min=0).sqrt()
    return low, 0.5 + 0.5 * (1 + 4 * eps_high * inverse).sqrt()


_TERMS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "triton": dispatch.imported(__package__, "triton", "terms"),
    "cpu": elements.terms,
    "reference": elements.terms,
}
