"""Ratios averaged over a whole path, and weights of sequences.

On flat sequences both live on tokens. On a tree a token belongs to several leaves, whose ratios differ, so the
surrogate runs on leaves (tokens of a leaf share its ratio, and its weight is w_l len_l) and a token's derivative is the
sum over the leaves below it. Everything is linear time in tokens: sums along paths and their adjoint.

Where a leaf's tokens differ in credit or weight, the surrogate runs on the pairs of a leaf and a token of its response,
which are flat sequences (`unfolded`): linear time in the tokens of all responses.
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
from .path_index import PathIndex
from .path_sums import SegmentSum
from .rules import Targets, corrected
from .subsets import live_of


def differs_within_leaves(fields: PolicyFields, objective: Objective) -> bool:
    """Return True if the objective needs one value a leaf, and the tokens of a leaf of a tree differ in theirs."""
    paths = fields.paths
    if paths is None or paths.sequence is not None or paths.pair_target is None or objective.scope != "path":
        return False
    of_tokens = objective.mismatch != "none" and objective.mismatch_level == "token"
    by_segment = objective.ratio_level == "segment" and not objective.weighs_leaves
    return not by_segment and (of_tokens or fields.token_weight is not None or paths.leaf_advantage is None)


def unfolded(fields: PolicyFields) -> tuple[PolicyFields, Tensor, Tensor]:
    """Return the fields of a tree's pairs as flat sequences ``[P]``, the target of each pair and which pairs count."""
    paths = fields.paths
    assert paths is not None
    assert paths.pair_target is not None
    assert paths.pair_leaf is not None
    assert paths.leaf_weight is not None
    counts, target = paths.pair_target >= 0, paths.pair_target.long().clamp(min=0)
    leaf, P = paths.pair_leaf.long(), len(paths.pair_target)
    weight = torch.where(counts, paths.leaf_weight[leaf], 0)
    credit = paths.pair_advantage
    if credit is None:
        assert paths.leaf_advantage is not None
        credit = paths.leaf_advantage[leaf]
    end = torch.searchsorted(leaf, torch.arange(len(paths.leaf_weight), device=leaf.device), right=True)
    begin = torch.cat([end.new_zeros(1), end[:-1]])
    taken = fields.take(target)
    segment = taken.segment
    if segment is not None:  # runs of two leaves must not join
        begins = torch.ones(P, dtype=torch.bool, device=leaf.device)
        begins[1:] = (segment[1:] != segment[:-1]) | (leaf[1:] != leaf[:-1])
        segment = begins.cumsum(0)
    flat = replace(
        taken,
        adv_pos=weight * credit.clamp(min=0),
        adv_neg=weight * credit.clamp(max=0),
        weight=weight,
        mask=counts if taken.mask is None else counts & taken.mask,
        pos_weight=None,
        neg_weight=None,
        segment=segment,
        paths=PathIndex(
            target_end=end[leaf],
            leaf_target=torch.where(end > begin, end - 1, -1),
            leaf_length=paths.leaf_length,
            leaf_weight=paths.leaf_weight,
            leaf_advantage=paths.leaf_advantage,
            sequence=leaf,
        ),
    )
    return flat, target, counts


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
    of_tokens = objective.mismatch != "none" and objective.mismatch_level == "token"
    if fields.token_weight is not None or of_tokens:
        raise ValueError(
            f"policy_loss: on trees ratio_level '{level}' with weights of tokens needs pair_target in the paths."
        )
    if objective.entropy_share < 1:
        raise ValueError(f"policy_loss: on trees ratio_level '{level}' does not combine with entropy_share.")
    if paths is None or paths.leaf_advantage is None or paths.leaf_weight is None:
        raise ValueError(
            f"policy_loss: ratio_level '{level}' needs sequences, or the advantages and weights of a tree's leaves; "
            "give flat() cu_seqlens."
        )
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
        recorded = sampler.isfinite()
        count = targets.total(recorded.to(length.dtype)).clamp(min=1)
        drift = targets.total(torch.where(recorded, sampler - logprob, 0)) / count
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
