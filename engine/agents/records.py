"""Records of an agent's episode: the calls that were sampled for it, how it ended and what it was rewarded with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..data.segment import LeafStatus
from ..data.tree import TokenTree


@dataclass(frozen=True)
class SampledCall:
    """A call of an episode that was sampled.

    Attributes:
        tree: the call as the engine recorded it: a tree of one leaf, whose response are the tokens that were sampled.
        role: name of the role that the call was made in, "" for the agent itself.
        number: place of the call in the order in which the episode's calls arrived.
    """

    tree: TokenTree
    role: str = ""
    number: int = 0


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode that has ended.

    Attributes:
        calls: those that were sampled to their end, in any order.
        status: the way the episode ended.
        reward: the reward that the agent gave, or None: a verifier judges the last answer.
        extras: further named rewards that the agent gave.
        failure: the reason for which the episode failed, a sentence; None if it did not.
    """

    calls: tuple[SampledCall, ...]
    status: LeafStatus
    reward: float | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
