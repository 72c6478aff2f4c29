"""Group callbacks decide what to do with a group after its responses are judged and before it is trained on.

A group callback is a function of the group's tree, whose ``rewards["reward"]`` has a value per leaf (NaN: no verdict)
and whose ``meta`` has ``prompt_id``, ``task``, ``prompt_text`` and ``attempt`` (requests made for it before this one).
It returns an instance of one of the classes below; None accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tree import TokenTree


@dataclass(frozen=True)
class Accept:
    """Train on the group."""


@dataclass(frozen=True)
class Drop:
    """Discard the group; another prompt takes its place. Counted as ``group/dropped_<reason>``."""

    reason: str


@dataclass(frozen=True)
class More:
    """Sample ``n`` further responses to the group's prompt, then call the callback again."""

    n: int


@dataclass(frozen=True)
class Retry:
    """Discard the group's responses and sample another prompt in its place, such as one with a hint."""

    text: str
    """The problem, before `data.template`."""
    entry: Mapping[str, Any] | None = None
    """The entry passed to the verifier; the group's own if None."""


@dataclass(frozen=True)
class Add:
    """Add given responses to the sampled ones: they count in the group's rewards but not in a policy's loss."""

    responses: Sequence[str]
    rewards: Sequence[float]


Answer = Accept | Drop | More | Retry | Add | None
GroupCallback = Callable[[TokenTree], Answer]


def dynamic_sampling(tree: TokenTree) -> Answer:
    """DAPO (Yu et al. 2025, eq. 11): drop groups whose rewards are all equal, and sample other prompts instead."""
    rewards = tree.rewards["reward"]
    known = rewards[~np.isnan(rewards)]
    return Drop("equal_rewards") if len(known) == 0 or np.ptp(known) == 0 else None


def until_unequal(tree: TokenTree, *, more: int = 4, most: int = 2) -> Answer:
    """Sample ``more`` responses, up to ``most`` times, while all rewards are equal; then drop the group (both defaults
    are inferred)."""
    if dynamic_sampling(tree) is None:
        return None
    return More(more) if tree.meta["attempt"] < most else Drop("equal_rewards")


def top_up(tree: TokenTree, *, most: int = 4) -> Answer:
    """DARS (as in Depth-Breadth Synergy in RLVR): sample hard problems more often, so that all have the same sum of
    absolute `group_norm` advantages, which is ``2 n sqrt(p (1 - p))`` for n rewards of 0 and 1: after n responses with
    a pass rate p below 1/2, ``n / (2 sqrt(p (1 - p))) - n`` more.

    Args:
        most: at most this many times n responses altogether (the default is inferred, and so is p = 1 / (2 n) where
            none is right).
    """
    rewards = tree.rewards["reward"]
    known = rewards[~np.isnan(rewards)]
    n = len(known)
    if tree.meta["attempt"] > 1 or n == 0:
        return None
    rate = max(float(np.mean(known >= 1)), 0.5 / n)
    more = round(min(n / (2 * (rate * (1 - rate)) ** 0.5), most * n) - n) if rate < 0.5 else 0
    return More(more) if more > 0 else None


def every(tree: TokenTree) -> bool:
    """Every group."""
    return True


def unequal(tree: TokenTree) -> bool:
    """Selective sample replay (VL-Rethinker): groups whose responses have different rewards, so that their advantages
    are not all 0; with ``prefer = 1`` for its sampling by ``|A|``."""
    return bool(np.ptp(tree.rewards["reward"]) > 0)


def solved(tree: TokenTree) -> bool:
    """Groups with a right response, one of a reward of at least 1."""
    return bool((tree.rewards["reward"] >= 1).any())


KEEPS: dict[str, Callable[..., bool]] = {"every": every, "unequal": unequal, "solved": solved}
"""Choices of groups for the replay store."""
GROUP_CALLBACKS: dict[str, GroupCallback] = {
    "dynamic_sampling": dynamic_sampling,
    "until_unequal": until_unequal,
    "top_up": top_up,
}
