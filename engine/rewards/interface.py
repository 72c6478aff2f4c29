"""What a run asks for verdicts, whoever gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """`Prompt.text`, for those that score how the response goes on."""
    given: float | None = None
    """What the rollout program gave the response as its reward."""


@dataclass(frozen=True)
class RewardResult:
    """A verdict: a finite value; or None, because judging failed or the verifier left the response out."""

    value: float | None
    reason: str | None
    """Why judging failed: `timeout`, `died`, what the verifier raised and where, or that its value is not finite."""
    named: dict[str, float] = field(default_factory=dict)
    """Further rewards by name, for `reward.shaping` and the records."""
    spans: list[Span] = field(default_factory=list)
    """Rewards of parts of the text."""
    unparsed: str | None = None
    """A word: why there was nothing to judge in the response; the value counts all the same."""
    skipped: str | None = None
    """A word: why the verifier gave no value."""


class Rewards(ABC):
    """Judges responses; a context manager.

    Attributes:
        note: what the user should know before a run, in a sentence.
        in_turn: it uses the rollout engine, and so is asked by whoever steps that, between two steps.
    """

    note: str = ""
    in_turn: bool = False

    @abstractmethod
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The verdict on every item, in the order given. Any number of threads may ask, unless it is `in_turn`."""

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        """Return for each problem's entry why no response to it could be judged; None if that is not known."""
        return [None] * len(entries)

    def close(self) -> None:
        """Nothing more is asked; callers that wait get an error. Closing it twice does nothing."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FromProgram(Rewards):
    """The rewards that the rollout program gave when it ended its branches; the others are skipped."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [
            RewardResult(None, None, skipped="no_reward") if item.given is None else RewardResult(item.given, None)
            for item in items
        ]
