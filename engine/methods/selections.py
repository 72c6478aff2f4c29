"""Selections: weights of a tree's leaves ``[L]`` or tokens ``[T]`` in a loss term. Pairings: pairs of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..data.columns import Array
from ..data.segment import Origin
from ..data.tree import TokenTree


def sampled(tree: TokenTree) -> Array:  # [T]
    """Select the tokens that the policy sampled and that are in the loss."""
    return tree.loss_mask & (tree.origin == Origin.SAMPLED)


def injected(tree: TokenTree) -> Array:  # [T]
    """Select the tokens that were not sampled but given: hints, a teacher's text, demonstrations."""
    return tree.origin == Origin.INJECTED


def rewarded(tree: TokenTree, *, least: float = 1.0) -> Array:  # [L]
    """RAFT, rejection sampling (Dong et al. 2023, arXiv 2304.06767): select responses with a reward of at least
    ``least`` (default inferred, for rewards of 0 and 1)."""
    return _rewards(tree) >= least


def best(tree: TokenTree) -> Array:  # [L]
    """Best of n: select the response of the highest reward, the first if several have it."""
    rewards = _rewards(tree)
    return (np.arange(tree.num_leaves) == rewards.argmax()) & (rewards > -np.inf)


def reward_weighted(tree: TokenTree, *, beta: float = 1.0) -> Array:  # [L]
    """Reward-weighted regression (Peters & Schaal 2007): weigh the n responses of a group by ``n softmax(R / beta)``
    (default of ``beta`` inferred)."""
    rewards = _rewards(tree) / beta
    if np.isinf(rewards).any():
        return np.zeros(tree.num_leaves)
    weights = np.exp(rewards - rewards.max())
    return len(rewards) * weights / weights.sum()


def _rewards(tree: TokenTree) -> Array:  # [L] float64
    """Return the rewards of responses; -inf if they were not judged (demonstrations), so that none is selected."""
    if "reward" not in tree.rewards:
        return np.full(tree.num_leaves, -np.inf)
    return tree.rewards["reward"].astype(np.float64)


SELECTIONS: dict[str, Callable[..., Array]] = {
    "sampled": sampled,
    "injected": injected,
    "rewarded": rewarded,
    "best": best,
    "reward_weighted": reward_weighted,
}


def best_and_worst(tree: TokenTree) -> list[tuple[int, int]]:
    """Pair the first response of the highest reward with the first of the lowest; no pair if all rewards are equal."""
    rewards = _rewards(tree)
    if (rewards == rewards[0]).all():
        return []
    return [(int(rewards.argmax()), int(rewards.argmin()))]


def every_unequal(tree: TokenTree, *, gap: float = 0.0) -> Sequence[tuple[int, int]]:
    """Pair every two responses whose rewards differ by more than ``gap``."""
    rewards = _rewards(tree)
    if np.isinf(rewards).any():
        return []
    better, worse = np.nonzero(rewards[:, None] - rewards[None, :] > gap)
    return list(zip(better.tolist(), worse.tolist(), strict=True))


PAIRINGS: dict[str, Callable[..., Sequence[tuple[int, int]]]] = {
    "best_and_worst": best_and_worst,
    "every_unequal": every_unequal,
}
