"""Fewer tokens to learn from: fields in which only some carry an advantage.

The others leave the matrix products of `linear_policy_loss` where nothing else needs them (no KL or entropy term, a
ratio of tokens). Lengths of sequences, ratios averaged over them, KL and entropy terms and the caller's normalizer stay
as they were: a subset changes which tokens learn, not how much each does.
"""

from __future__ import annotations

from torch import Tensor

from ..checks import Arguments
from .fields import PolicyFields
from .selection import live_of, only, top_share


def entropy_quantile(fields: PolicyFields, entropy: Tensor, share: float) -> PolicyFields:
    """Keep the tokens whose entropy ``[M]`` is at or above the (1 - share) quantile of the masked ones (80/20 rule).

    The entropy is of an earlier pass (old log-probs, sampling); `Objective.entropy_share` takes that of the forward.

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check("entropy_quantile", fields, share, entropy=entropy)
    return only(fields, top_share(entropy, live_of(fields), share))


def random_share(fields: PolicyFields, share: float, *, token: Tensor, seed: int) -> PolicyFields:
    """Keep each token with probability ``share``, and weigh those kept by 1 / share, so that the loss is unbiased.

    Args:
        token: ``[M] int64``, a number of each token that does not depend on the batch (sample id and position, say):
            the choice follows from it and ``seed`` alone.

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check("random_share", fields, share, token=token)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"random_share: seed must be an integer of 64 bits, got {seed!r}.")
    return only(fields, _uniform(token, seed) < share, scale=1 / share)


def probability_mask(fields: PolicyFields, below: float = 0.9) -> PolicyFields:
    """Keep the tokens that the old policy gave a probability under ``below`` (SPO): the places where paths part.

    Raises:
        ValueError: the fields have no old_logprob, or below is not in (0, 1].
    """
    _check("probability_mask", fields, below, "below")
    if fields.old_logprob is None:
        raise ValueError("probability_mask: the fields must have old_logprob.")
    return only(fields, fields.old_logprob.exp() < below)


def calm_tokens(fields: PolicyFields, entropy: Tensor, kl: Tensor, share: float) -> PolicyFields:
    """Leave out the ``share`` of highest entropy ``[M]`` and that of highest KL to a reference ``[M]`` (EKSFT, NLL).

    The thresholds are quantiles of the batch [inf].

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
    for known, values in of_targets.items():
        kind = check.integers if known == "token" else check.floats
        kind(known, values, fields.weight.shape, ", one a target")


def _uniform(token: Tensor, seed: int) -> Tensor:
    """``[M]`` in [0, 1), a hash (splitmix64's finaliser, with signed shifts)."""
    x = token.long() * -7046029254386353131 + seed
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    x = x ^ ((x >> 31) & (2**33 - 1))
    return (x & (2**53 - 1)).double() / 2**53
