"""Ratios averaged over a whole path, and weights of sequences.

On flat sequences both live on tokens. On a tree a token belongs to several leaves, whose ratios differ, so the
surrogate runs on leaves (tokens of a leaf share its ratio, and its weight is w_l len_l) and a token's derivative is the
sum over the leaves below it. Everything is linear time in tokens: sums along paths and their adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import MAX_LOG_RATIO
from .fields import PolicyFields
from .objective import Objective
from .path_index import PathIndex, SegmentSum
from .rules import Targets, corrected
from .subsets import live_of


class Averaging(NamedTuple):
    """Takes means of M token values over K sequences, segments or leaves."""

    fields: PolicyFields  # [K], on which the surrogate is evaluated
    mean: Callable[[Tensor], Tensor]  # [M] -> [K]
    back: Callable[[Tensor], Tensor]  # [K] -> [M], derivative by the K means to that by the M values


def averaging(fields: PolicyFields, objective: Objective) -> Averaging:
    """Return how the objective's ratio level, which is not "token", averages.

    Raises:
        ValueError: the fields do not tell what belongs together.
    """
    level = objective.ratio_level
    if level == "segment":
        if fields.segment is None:
            raise ValueError("policy_loss: ratio_level 'segment' needs segment in the fields.")
        return _over_runs(fields, fields.segment)
    paths = fields.paths
    if paths is not None and paths.sequence is not None:
        of_runs = _over_runs(fields, paths.sequence)
        # each token has its own derivative, at its sequence's ratio (Zheng et al. 2025, eq. 13)
        return of_runs._replace(back=lambda v: v) if level == "sequence_token" else of_runs
    if fields.token_weight is not None:
        raise ValueError(f"policy_loss: on trees ratio_level '{level}' does not combine with token_weight.")
    if paths is None or paths.leaf_advantage is None or paths.leaf_weight is None:
        raise ValueError(
            f"policy_loss: ratio_level '{level}' needs sequences, or the advantages and weights of a tree's leaves; "
            "give flat() cu_seqlens."
        )
    if objective.mismatch != "none" and objective.mismatch_level == "token":
        raise ValueError(
            f"policy_loss: on trees ratio_level '{level}' does not combine with mismatch_level 'token'; use "
            "'sequence' or 'geometric'."
        )
    if objective.entropy_share < 1:
        raise ValueError(f"policy_loss: on trees ratio_level '{level}' does not combine with entropy_share.")
    return _over_leaves(fields, paths)


def _over_runs(fields: PolicyFields, label: Tensor) -> Averaging:
    """Average over runs of equal labels, without the masked targets."""
    run_sum, live = SegmentSum(label), live_of(fields)
    count = run_sum(live.to(fields.weight.dtype)).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return run_sum(torch.where(live, values, 0)) / count

    def back(derivative: Tensor) -> Tensor:
        return torch.where(live, mean(derivative), 0)

    return Averaging(fields, mean, back)


def _over_leaves(fields: PolicyFields, paths: PathIndex) -> Averaging:
    assert paths.leaf_advantage is not None
    assert paths.leaf_weight is not None
    live = live_of(fields)
    length = paths.leaf_length.clamp(min=1)
    tokens, advantage = paths.leaf_weight * paths.leaf_length, paths.leaf_advantage
    of_leaves = PolicyFields(tokens * advantage.clamp(min=0), tokens * advantage.clamp(max=0), tokens)

    def mean(values: Tensor) -> Tensor:
        return paths.sum(torch.where(live, values, 0)) / length

    def back(derivative: Tensor) -> Tensor:
        return torch.where(live, paths.spread(derivative / length), 0)

    return Averaging(of_leaves, mean, back)


def apply_leaf_weights(
    logprob: Tensor,  # [M]
    log_ratio: Tensor,  # [M]
    fields: PolicyFields,
    objective: Objective,
) -> PolicyFields:
    """Return fields with each leaf's advantage weighted by what its path says, without gradient.

    The weights are those of a mismatch correction of sequences, of the off-policy mask, and of a leaf_weight rule.

    Raises:
        ValueError: the fields do not tell sequences or leaves.
    """
    if not objective.weighs_leaves:
        return fields
    paths = fields.paths
    if paths is None or (paths.sequence is None and (paths.leaf_advantage is None or paths.leaf_weight is None)):
        raise ValueError(
            "policy_loss: weights of sequences need to know these, or the advantages and weights of a tree's leaves; "
            "give flat() cu_seqlens."
        )
    targets = Targets(logprob, log_ratio, fields)
    length = paths.leaf_length.clamp(min=1)
    one = torch.ones_like(length)
    pos, neg, both = one, one, one
    if objective.mismatch != "none" and objective.mismatch_level != "token":
        assert fields.behaviour_logprob is not None
        old = logprob if fields.old_logprob is None else fields.old_logprob
        gap = targets.total(torch.where(fields.behaviour_logprob.isfinite(), old - fields.behaviour_logprob, 0))
        gap = gap / length if objective.mismatch_level == "geometric" else gap
        both = corrected(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), objective)
    if objective.off_policy_delta is not None:
        sampler = fields.old_logprob if fields.behaviour_logprob is None else fields.behaviour_logprob
        assert sampler is not None
        known = sampler.isfinite()
        count = targets.total(known.to(length.dtype)).clamp(min=1)
        drift = targets.total(torch.where(known, sampler - logprob, 0)) / count
        neg = torch.where(drift > objective.off_policy_delta, 0, neg)
    if objective.rule is not None and objective.rule.kind == "leaf_weight":
        factor = objective.rule.function(targets, objective.rule_options)
        pos, neg = pos * factor.pos, neg * factor.neg
    return _reweighted(fields, paths, both * pos, both * neg, both)


def _reweighted(fields: PolicyFields, paths: PathIndex, pos: Tensor, neg: Tensor, both: Tensor) -> PolicyFields:
    """Return fields whose S_pos, S_neg and weight of g_all are multiplied by factors ``[L]`` of the leaves."""
    if paths.sequence is not None:
        of_all = fields.weight if fields.all_weight is None else fields.all_weight
        fields = replace(
            fields,
            adv_pos=fields.adv_pos * pos[paths.sequence],
            adv_neg=fields.adv_neg * neg[paths.sequence],
            all_weight=of_all * both[paths.sequence],
        )
        return fields
    assert paths.leaf_advantage is not None
    assert paths.leaf_weight is not None
    w, advantage = paths.leaf_weight, paths.leaf_advantage
    signed = torch.where(advantage > 0, advantage * pos, advantage * neg)
    if fields.pos_weight is not None:
        up, down = paths.spread(w * (signed > 0)), paths.spread(w * (signed < 0))
        fields = replace(fields, pos_weight=up, neg_weight=down)
    return replace(
        fields,
        adv_pos=paths.spread(w * signed.clamp(min=0)),
        adv_neg=paths.spread(w * signed.clamp(max=0)),
        all_weight=paths.spread(w * both),
        paths=replace(paths, leaf_advantage=signed),
    )
