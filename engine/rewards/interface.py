"""The interface of all that judges responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from .spans import Span


@dataclass(frozen=True)
class RewardItem:
    """A response to judge."""

    response_text: str
    entry: dict[str, Any]
    """`Prompt.entry`: for the verifier ``task`` an item of its dataset, for the others a row with an ``answer``."""
    problem: str = ""
    """`Prompt.problem`, for judges."""
    prompt: str = ""
    """`Prompt.text`, for models that read the response after its prompt."""
    given_reward: float | None = None
    """The reward that the rollout program assigned to the response."""
    roles: Mapping[str, str] | None = None
    """The texts of the roles that wrote the response, by name; None where all of it is of one role."""
    judged: float | None = None
    """The value of the part that `Rewards.reads_part` names; None if it has none."""
    ended: bool = True
    """The response ended by itself: it was not cut off at a limit."""
    group: int | None = None
    """Number of the group that it belongs to, whose responses follow each other; None: it is alone."""
    stored: tuple[Sequence[str], int] | None = None
    """The texts among which the response's is, and its place there; ``response_text`` is then empty."""

    def fetched(self) -> RewardItem:
        """Return the item with its text."""
        if self.stored is None:
            return self
        texts, place = self.stored
        return replace(self, response_text=texts[place], stored=None)


@dataclass(frozen=True)
class RewardResult:
    """A verdict: a finite value, or None if judging failed or the verifier skipped the response."""

    value: float | None
    reason: str | None
    """The reason why judging failed: `timeout`, `died`, the verifier's exception and line, or a value not finite."""
    named: dict[str, float] = field(default_factory=dict)
    """Further rewards by name, for `reward.shaping` and the records."""
    spans: list[Span] = field(default_factory=list)
    """Rewards of parts of the text."""
    unparsed: str | None = None
    """A word for the reason why the response held nothing to judge; the value counts all the same."""
    skipped: str | None = None
    """A word for the reason why the verifier returned no value."""


class Rewards(ABC):
    """Judges responses; a context manager.

    Attributes:
        note: a sentence for the user before a run, or empty.
        reads_part: name of another part of the reward whose value it reads, and which is judged before it.
        in_turn: it uses the rollout engine, so `score` must be called by the engine's thread, between two steps.
        at_once: number of concurrent calls of `score` that keep all verifiers busy, each with what had to be judged by
            then.
        by_group: it compares the responses of a group, so `score` needs all of them at once.
        asked_again: number of items so far whose process was lost and that were given to another.
        fetches: it takes items whose texts are elsewhere (`RewardItem.stored`), and raises what fetching them raises.
    """

    note: str = ""
    in_turn: bool = False
    reads_part: str = ""
    by_group: bool = False
    at_once: int = 2
    asked_again: int = 0
    fetches: bool = False

    @abstractmethod
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return the verdict on every item, in the order given. Any number of threads may call it, unless `in_turn`."""

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        """Return for each problem's entry the reason why no response to it could be judged; None if there is none."""
        return [None] * len(entries)

    def close(self) -> None:
        """Free all resources; callers that wait get an error. Closing twice has no further effect."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FromProgram(Rewards):
    """Returns the rewards that the rollout program assigned when it ended branches; other responses are skipped."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [
            RewardResult(None, None, skipped="no_reward")
            if item.given_reward is None
            else RewardResult(item.given_reward, None)
            for item in items
        ]
