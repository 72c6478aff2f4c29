"""Learning from fewer tokens: fields in which only some carry an advantage.

The others leave the matrix products of `linear_policy_loss` where nothing else needs them (no KL or entropy term, a
ratio of tokens). Lengths of sequences, ratios averaged over them, KL and entropy terms and the caller's normalizer stay
as they were: a subset changes which tokens learn, not how much each does.

A shared token counts once, with the mean advantage of the leaves that share it, (S_pos + S_neg) / S_1. Choices are made
by rank, not by counts that the host reads, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..checks import Arguments
from .fields import PolicyFields


def entropy_quantile(fields: PolicyFields, entropy: Tensor, share: float) -> PolicyFields:
    """Keep the tokens whose entropy is at or above the (1 - share) quantile of the unmasked ones.

    `Objective.entropy_share` does the same with the entropy of the forward pass. (Wang et al. 2025, "Beyond the 80/20
    rule")

    Args:
        entropy: ``[M]`` nats, of an earlier pass (old log-probs, sampling).
        share: in (0, 1].

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check("entropy_quantile", fields, share, entropy=entropy)
    return only(fields, top_share(entropy, live_of(fields), share))


def random_share(fields: PolicyFields, share: float, *, token: Tensor, seed: int) -> PolicyFields:
    """Keep each token with probability ``share``, and weigh those kept by 1 / share, so that the loss is unbiased.

    Args:
        share: in (0, 1].
        token: ``[M] int64``, a number of each token that does not depend on the batch (sample id and position, say).
        seed: any int64; the choice follows from ``token`` and ``seed`` alone.

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check("random_share", fields, share, token=token)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"random_share: seed must be an integer of 64 bits, got {seed!r}.")
    return only(fields, _uniform(token, seed) < share, scale=1 / share)


def probability_mask(fields: PolicyFields, below: float = 0.9) -> PolicyFields:
    """Keep the tokens that the old policy gave a probability under ``below``: the places where paths part.

    (Guo et al. 2025, segment policy optimization)

    Args:
        fields: with old_logprob.
        below: in (0, 1].

    Raises:
        ValueError: the fields have no old_logprob, or below is not in (0, 1].
    """
    _check("probability_mask", fields, below, "below")
    if fields.old_logprob is None:
        raise ValueError("probability_mask: the fields must have old_logprob.")
    return only(fields, fields.old_logprob.exp() < below)


def calm_tokens(fields: PolicyFields, entropy: Tensor, kl: Tensor, share: float) -> PolicyFields:
    """Leave out the ``share`` of highest entropy and the ``share`` of highest KL to a reference (EKSFT, for an NLL).

    The thresholds are quantiles of the batch; this is reconstructed, not read from the paper.

    Args:
        entropy: ``[M]`` nats.
        kl: ``[M]`` nats, an estimate for each token.
        share: in (0, 1].

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check("calm_tokens", fields, share, entropy=entropy, kl=kl)
    live = live_of(fields)
    return only(fields, live & ~top_share(entropy, live, share) & ~top_share(kl, live, share))


def _check(op: str, fields: PolicyFields, share: float, name: str = "share", **of_targets: Tensor) -> None:
    check = Arguments(op, "the fields", fields.weight)
    check.number(name, share)
    check.require(0 < share <= 1, f"{name} must be in (0, 1], got {share}")
    for column, values in of_targets.items():
        kind = check.integers if column == "token" else check.floats
        kind(column, values, fields.weight.shape, ", one a target")


def _uniform(token: Tensor, seed: int) -> Tensor:
    """Return ``[M]`` in [0, 1): a hash of token and seed (splitmix64's finaliser, with signed shifts)."""
    x = token.long() * -7046029254386353131 + seed
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    x = x ^ ((x >> 31) & (2**33 - 1))
    return (x & (2**53 - 1)).double() / 2**53


def live_of(fields: PolicyFields) -> Tensor:  # [M] bool
    """Return the mask of the fields; all True where they have none."""
    return torch.ones_like(fields.weight, dtype=torch.bool) if fields.mask is None else fields.mask


def only(fields: PolicyFields, chosen: Tensor, scale: float = 1.0) -> PolicyFields:
    """Return fields whose surrogate is of the ``chosen [M] bool`` tokens alone, times ``scale``.

    KL and entropy terms, ratios of sequences, lengths and normalizer stay, as in TRL. Leaves of a tree have one
    advantage each, which no longer says what its tokens learn: it is dropped, so objectives that need it refuse these
    fields.
    """
    return _changed(fields, lambda t: torch.where(chosen, scale * t, 0))


def weighed(fields: PolicyFields, token_weight: Tensor) -> PolicyFields:
    """Return fields whose surrogate is multiplied by ``token_weight [M]``; like `only` in everything else."""
    return _changed(fields, lambda t: token_weight * t)


def _changed(fields: PolicyFields, change: Callable[[Tensor], Tensor]) -> PolicyFields:
    of_all = fields.weight if fields.all_weight is None else fields.all_weight
    pos, neg, of_all = (change(t) for t in (fields.adv_pos, fields.adv_neg, of_all))
    paths = fields.paths
    if paths is not None:
        paths = replace(paths, leaf_advantage=None)
    return replace(fields, adv_pos=pos, adv_neg=neg, all_weight=of_all, paths=paths)


def top_share(values: Tensor, live: Tensor, share: float) -> Tensor:
    """Return ``[M] bool``: the live tokens at or above the (1 - share) quantile of the finite ones, by linear
    interpolation."""
    live = live & values.isfinite()
    ordered = torch.where(live, values, torch.inf).sort().values
    place = (live.sum() - 1).clamp(min=0) * (1 - share)
    low = place.floor().long()
    high = torch.minimum(low + 1, (live.sum() - 1).clamp(min=0))
    below, above = ordered[low], ordered[high]
    threshold = below + (above - below) * (place - low)
    return live & (values >= threshold)


def covariance(logprob: Tensor, fields: PolicyFields) -> Tensor:
    """Return ``(A - mean A) (logprob - mean logprob)`` ``[M]``, means over live tokens whose log-prob is finite."""
    live = live_of(fields) & logprob.isfinite()
    count = live.sum().clamp(min=1)
    advantage = torch.where(fields.weight != 0, (fields.adv_pos + fields.adv_neg) / fields.weight, 0)

    def centred(x: Tensor) -> Tensor:
        return x - torch.where(live, x, 0).sum() / count

    return centred(advantage) * centred(logprob)


def share_of(live: Tensor, share: float) -> Tensor:  # [] int
    """Return how many tokens ``share`` of the live ones is, at least 1."""
    return (live.sum() * share).floor().clamp(min=1)


def rank(values: Tensor) -> Tensor:
    """Return the place of each value ``[M]`` in ascending order; equal ones keep their order."""
    order = values.argsort(stable=True)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
