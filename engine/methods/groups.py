"""What becomes of a group once its responses are judged, before it may be trained on.

A group callback is a function of the group's tree, whose ``rewards["reward"]`` has a value a leaf (NaN: no verdict) and
whose ``meta`` names ``prompt_id``, ``task``, ``prompt_text`` and ``attempt`` (requests made for it before this one).
It answers with one of the classes below; None accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tree import TokenTree


@dataclass(frozen=True)
class Accept:
    """Train on it."""


@dataclass(frozen=True)
class Drop:
    """Give it up; another prompt takes its place. Counted as ``group/dropped_<reason>``."""

    reason: str


@dataclass(frozen=True)
class More:
    """Sample ``n`` further responses to its prompt, then ask again."""

    n: int


@dataclass(frozen=True)
class Retry:
    """Give up its responses and sample another prompt in its place, such as one with a hint."""

    text: str
    """The problem, before `data.template`."""
    entry: Mapping[str, Any] | None = None
    """What the verifier is given; the group's own if None."""


@dataclass(frozen=True)
class Add:
    """Put given responses beside its own: no part of a policy's loss, but of the group's rewards."""

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
    """Sample ``more`` responses, up to ``most`` times, while all rewards are equal; then drop the group."""
    if dynamic_sampling(tree) is None:
        return None
    return More(more) if tree.meta["attempt"] < most else Drop("equal_rewards")


GROUP_CALLBACKS: dict[str, GroupCallback] = {"dynamic_sampling": dynamic_sampling, "until_unequal": until_unequal}
