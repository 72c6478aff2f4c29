"""Records of an agent's episode: the calls that were sampled for it, how it ended and what it was rewarded with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..data.segment import LeafStatus
from ..data.tree import TokenTree

Cause = Literal["raised", "exit", "signal", "timeout", "reward", "silent", "engine", "template", "container", "dropped"]


class Failure(NamedTuple):
    """The cause of a failure, as metrics name it, and the reason, a sentence."""

    cause: Cause
    why: str


class AgentError(Exception):
    """An agent failed, as ``failure`` says."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.failure = Failure(cause, why)


class Times(NamedTuple):
    """Seconds of a call since its episode began.

    Attributes:
        arrived: its request had come.
        begun: the engine began with it.
        first: its first token was there; None where only another process knows.
        ended: its answer was complete.
    """

    arrived: float
    begun: float
    first: float | None
    ended: float


@dataclass(frozen=True)
class SampledCall:
    """A call of an episode that was sampled.

    Attributes:
        tree: the call as the engine recorded it: a tree of one leaf, whose response are the tokens that were sampled.
        role: name of the role that the call was made in, "" for the agent itself.
        number: place of the call in the order in which the episode's calls arrived.
        times: None if they are not known.
    """

    tree: TokenTree
    role: str = ""
    number: int = 0
    times: Times | None = None


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode that has ended.

    Attributes:
        calls: those that were sampled to their end, in any order.
        status: the way the episode ended.
        reward: the reward that the agent gave, or None: a verifier judges the last answer.
        extras: further named rewards that the agent gave.
        failure: None if the episode did not fail.
        seconds: from its beginning to its end.
    """

    calls: tuple[SampledCall, ...]
    status: LeafStatus
    reward: float | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """The seconds in which the agent waited for no call: its own work, and its tools'."""
        left, end = self.seconds, 0.0
        for times in sorted(call.times for call in self.calls if call.times is not None):
            left -= max(0.0, times.ended - max(times.arrived, end))
            end = max(end, times.ended)
        return max(left, 0.0)
