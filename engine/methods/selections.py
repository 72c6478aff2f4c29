"""Selections: what of a tree a loss term sees, as weights of its leaves ``[L]`` or of its tokens ``[T]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..data.columns import Array
from ..data.segment import Origin
from ..data.tree import TokenTree


def sampled(tree: TokenTree) -> Array:  # [T]
    """Tokens the policy sampled."""
    return tree.loss_mask & (tree.origin == Origin.SAMPLED)


def injected(tree: TokenTree) -> Array:  # [T]
    """Tokens that were given: hints, a teacher's words, demonstrations."""
    return tree.origin == Origin.INJECTED


def rewarded(tree: TokenTree, *, least: float = 1.0) -> Array:  # [L]
    """RAFT: responses with a reward of at least ``least``."""
    return _rewards(tree) >= least


def best(tree: TokenTree) -> Array:  # [L]
    """Best of n: the response of the highest reward, the first where several have it."""
    rewards = _rewards(tree)
    return (np.arange(tree.num_leaves) == rewards.argmax()) & (rewards > -np.inf)


def reward_weighted(tree: TokenTree, *, beta: float = 1.0) -> Array:  # [L]
    """Responses weighted by ``n softmax(R / beta)`` over the group (reward-weighted regression)."""
    rewards = _rewards(tree) / beta
    if np.isinf(rewards).any():
        return np.zeros(tree.num_leaves)
    weights = np.exp(rewards - rewards.max())
    return len(rewards) * weights / weights.sum()


def _rewards(tree: TokenTree) -> Array:  # [L] float64
    """Rewards of responses; -inf of those nobody judged, such as demonstrations, so that none of them is chosen."""
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
    """The first responses of the highest and of the lowest reward; no pair where all rewards are equal."""
    rewards = _rewards(tree)
    if (rewards == rewards[0]).all():
        return []
    return [(int(rewards.argmax()), int(rewards.argmin()))]


def every_unequal(tree: TokenTree, *, gap: float = 0.0) -> Sequence[tuple[int, int]]:
    """Every two responses whose rewards differ by more than ``gap``."""
    rewards = _rewards(tree)
    if np.isinf(rewards).any():
        return []
    better, worse = np.nonzero(rewards[:, None] - rewards[None, :] > gap)
    return list(zip(better.tolist(), worse.tolist(), strict=True))


PAIRINGS: dict[str, Callable[..., Sequence[tuple[int, int]]]] = {
    "best_and_worst": best_and_worst,
    "every_unequal": every_unequal,
}
