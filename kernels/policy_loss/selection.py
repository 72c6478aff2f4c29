"""What an objective takes from the whole batch: tokens chosen by covariance or by entropy.

A shared token counts once, with the mean advantage of the leaves that share it, (S_pos + S_neg) / S_1. Choices are
ranks, not counts read by the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .elementwise import ratio
from .fields import PolicyFields
from .objective import Objective


def apply(
    logprob: Tensor,  # [M]
    entropy: Tensor | None,  # [M]
    d: Tensor,  # [M]
    fields: PolicyFields,
    objective: Objective,
) -> PolicyFields:
    """The fields with what was chosen turned into weights: advantages, and the weight of g_all."""
    if not len(logprob):
        return fields
    if objective.entropy_share < 1:
        assert entropy is not None
        chosen = top_share(entropy, live_of(fields), objective.entropy_share)
        fields = only(fields, chosen)
    if objective.surrogate == "clip_cov":
        return only(fields, ~clip_cov_drops(logprob, d, fields, objective))
    if objective.surrogate == "kl_cov":
        live = live_of(fields)
        cov = torch.where(live, covariance(logprob, fields), -torch.inf)
        first = rank(-cov) < share_of(live, objective.covariance_share)
        return replace(fields, all_weight=torch.where(first & live, fields.weight, 0))
    return fields


def live_of(fields: PolicyFields) -> Tensor:  # [M] bool
    return torch.ones_like(fields.weight, dtype=torch.bool) if fields.mask is None else fields.mask


def only(fields: PolicyFields, chosen: Tensor, scale: float = 1.0) -> PolicyFields:
    """The surrogate of the chosen tokens alone, times ``scale``; KL and entropy terms, ratios of sequences, lengths and
    normalizer stay, as in TRL.

    Leaves of a tree have one advantage each, which no longer says what its tokens learn: it is dropped, so objectives
    that need it refuse these fields.
    """
    return _changed(fields, lambda t: torch.where(chosen, scale * t, 0))


def weighed(fields: PolicyFields, token_weight: Tensor) -> PolicyFields:
    """The surrogate of each token times its weight ``[M]``; what `only` leaves as it is stays here too."""
    return _changed(fields, lambda t: token_weight * t)


def _changed(fields: PolicyFields, change: Callable[[Tensor], Tensor]) -> PolicyFields:
    of_all = fields.weight if fields.all_weight is None else fields.all_weight
    pos, neg, of_all = (change(t) for t in (fields.adv_pos, fields.adv_neg, of_all))
    paths = fields.paths
    if paths is not None:
        paths = replace(paths, leaf_advantage=None)
    return replace(fields, adv_pos=pos, adv_neg=neg, all_weight=of_all, paths=paths)


def top_share(values: Tensor, live: Tensor, share: float) -> Tensor:
    """``[M] bool``: the live tokens at or above the (1 - share) quantile of the live values (linear interpolation)."""
    ordered = torch.where(live, values, torch.inf).sort().values
    place = (live.sum() - 1).clamp(min=0) * (1 - share)
    low = place.floor().long()
    high = torch.minimum(low + 1, (live.sum() - 1).clamp(min=0))
    below, above = ordered[low], ordered[high]
    threshold = below + (above - below) * (place - low)
    return live & (values >= threshold)


def covariance(logprob: Tensor, fields: PolicyFields) -> Tensor:
    """``(A - mean A) (logprob - mean logprob)`` [M], means over live tokens."""
    live = live_of(fields)
    count = live.sum().clamp(min=1)
    advantage = torch.where(fields.weight != 0, (fields.adv_pos + fields.adv_neg) / fields.weight, 0)

    def centred(x: Tensor) -> Tensor:
        return x - torch.where(live, x, 0).sum() / count

    return centred(advantage) * centred(logprob)


def clip_cov_drops(logprob: Tensor, d: Tensor, fields: PolicyFields, objective: Objective) -> Tensor:
    """``[M] bool``: a random few of the tokens of high covariance that the clip has not caught."""
    live = live_of(fields)
    r, _ = ratio(d)
    advantage = fields.adv_pos + fields.adv_neg
    low = 1 - objective.eps_low if fields.clip_low is None else fields.clip_low
    high = 1 + objective.eps_high if fields.clip_high is None else fields.clip_high
    caught = ((advantage > 0) & (r > high)) | ((advantage < 0) & (r < low))
    cov = covariance(logprob, fields)
    candidate = live & ~caught & (cov > objective.covariance_low) & (cov < objective.covariance_high)
    order = rank(torch.where(candidate, _noise(logprob), torch.inf))
    return candidate & (order < share_of(live, objective.covariance_share))


def share_of(live: Tensor, share: float) -> Tensor:  # [] int
    return (live.sum() * share).floor().clamp(min=1)


def rank(values: Tensor) -> Tensor:
    """Place of each in ascending order; equal ones in their own."""
    order = values.argsort(stable=True)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


def _noise(logprob: Tensor) -> Tensor:
    """``[M]`` in [0, 1): a hash of the log-prob's bits, so that the choice depends on neither order nor generator."""
    x = logprob.float().view(torch.int32).long()
    for multiplier in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        x = x * multiplier
        x = x ^ (x >> 29)
    return (x & 0xFFFFFF).double() / 2**24
