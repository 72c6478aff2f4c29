"""Fewer tokens to learn from: fields whose mask is smaller, so that the others never reach a matrix product.

Lengths of sequences, and with them the weights of their tokens, stay as they were, and so does the caller's normalizer:
a subset changes which tokens learn, not how much each does.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .fields import PolicyFields
from .selection import live_of, top_share


def entropy_quantile(fields: PolicyFields, entropy: Tensor, share: float) -> PolicyFields:
    """Keep the tokens whose entropy ``[M]`` is at or above the (1 - share) quantile of the masked ones (80/20 rule).

    The entropy is of an earlier pass (old log-probs, sampling); `Objective.entropy_share` takes that of the forward.

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check(share, entropy, fields)
    return replace(fields, mask=top_share(entropy, live_of(fields), share))


def random_share(fields: PolicyFields, share: float, *, token: Tensor, seed: int) -> PolicyFields:
    """Keep each token with probability ``share``, and weigh those kept by 1 / share, so that the loss is unbiased.

    Args:
        token: ``[M] int64``, a number of each token that does not depend on the batch (sample id and position, say):
            the choice follows from it and ``seed`` alone.

    Raises:
        ValueError: share is not in (0, 1], or shapes differ.
    """
    _check(share, token, fields)
    kept = _uniform(token, seed) < share
    up = 1 / share
    of_all = None if fields.all_weight is None else fields.all_weight * up
    return replace(
        fields,
        mask=live_of(fields) & kept,
        adv_pos=fields.adv_pos * up,
        adv_neg=fields.adv_neg * up,
        weight=fields.weight * up,
        all_weight=of_all,
    )


def probability_mask(fields: PolicyFields, below: float = 0.9) -> PolicyFields:
    """Keep the tokens that the old policy gave a probability under ``below`` (SPO): the places where paths part.

    Raises:
        ValueError: the fields have no old_logprob, or below is not in (0, 1].
    """
    if fields.old_logprob is None:
        raise ValueError("probability_mask: the fields must have old_logprob.")
    if not 0 < below <= 1:
        raise ValueError(f"probability_mask: below must be in (0, 1], got {below}.")
    return replace(fields, mask=live_of(fields) & (fields.old_logprob.exp() < below))


def _check(share: float, values: Tensor, fields: PolicyFields) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}.")
    if values.shape != fields.weight.shape:
        raise ValueError(f"expected one value a pair, {list(fields.weight.shape)}, got {list(values.shape)}.")


def _uniform(token: Tensor, seed: int) -> Tensor:
    """``[M]`` in [0, 1), a hash (splitmix64's finaliser, with signed shifts)."""
    x = token.long() * -7046029254386353131 + seed
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * multiplier
    x = x ^ ((x >> 31) & (2**33 - 1))
    return (x & (2**53 - 1)).double() / 2**53
