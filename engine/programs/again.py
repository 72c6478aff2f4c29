"""Responses that go on after their end: another try after a wrong answer, or a call to think again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..chat.marks import response_text
from ..data.segment import LeafStatus
from .program import Action, BranchId, Call, Finish, Fork, Given, GroupState, RolloutProgram, SegmentReport


class TryAgain(RolloutProgram):
    """Independent responses; after a wrong one ends, a text asks for another try in the same response (UFO).

    A response that ends at one of `rollout.stop`, or at its longest, is not continued. The text is not trained on; the
    end token before it is.

    Args:
        text: asks for another try (the words are inferred).
        tries: tries of one response altogether (default inferred).
        always: ask after right responses too, such as for a second thought (VL-Rethinker).

    Raises:
        ValueError: the text is empty, or tries is below 2.
    """

    def __init__(self, text: str = "\nLet's try again.\n", tries: int = 3, always: bool = False) -> None:
        if not text or tries < 2:
            raise ValueError("try_again needs a text and tries >= 2.")
        self.text, self.tries, self.always = text, tries, always

    @property
    def segment_stop_token_ids(self) -> Sequence[int]:  # type: ignore[override]
        """The end tokens: a response rests there."""
        ends = self.end_token_ids or ([] if self.tokenizer is None else [self.tokenizer.eos_token_id])
        return sorted(set(ends) - {None})

    def start(self, group: GroupState) -> int:
        if self.tokenizer is None:
            raise ValueError("try_again puts a text into responses, so the engine needs a tokenizer.")
        if self.verify is None and not self.always:
            raise ValueError("try_again asks for another try after a wrong response, and needs a run's verifier.")
        self._tried: dict[BranchId, int] = {}
        self._asked: dict[BranchId, str] = {}  # responses that are being judged
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is not None:
                continue
            tried = self._tried[segment.branch] = self._tried.get(segment.branch, 0) + 1
            if tried == self.tries:
                yield Finish(segment.branch)
            elif self.always:
                yield self._again(segment.branch)
            else:
                assert self.tokenizer is not None
                self._asked[segment.branch] = response_text(self.tokenizer, segment.response_ids)
                yield self._judged(segment.branch)

    def _judged(self, branch: BranchId) -> Action:
        assert self.verify is not None
        return Call(branch, self.verify, (self._asked[branch], self.context))

    def repeated(self, group: GroupState, branches: Sequence[BranchId]) -> list[Action]:
        return [self._judged(branch) for branch in branches]

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        del self._asked[branch]
        right = result is not None and float(result) >= 1
        yield Finish(branch, LeafStatus.STOP) if right else self._again(branch)

    def _again(self, branch: BranchId) -> Action:
        assert self.tokenizer is not None
        return Fork(branch, append=Given(self.tokenizer.encode(self.text, add_special_tokens=False)))


class PlanExecute(RolloutProgram):
    """Plans first, and several executions of each (E2C): a tree of two levels, cut where a plan ends.

    Args:
        plans: branches at the prompt; each is continued n / plans times after its end.
        plan_end: text that ends a plan (inferred).

    Raises:
        ValueError: plans is below 1, or plan_end is empty.
    """

    def __init__(self, plans: int = 4, plan_end: str = "</plan>") -> None:
        if plans < 1 or not plan_end:
            raise ValueError("plan_execute needs plans >= 1 and a plan_end.")
        self.plans, self.segment_stop = plans, (plan_end,)

    def start(self, group: GroupState) -> int:
        if group.width % self.plans:
            raise ValueError(f"plan_execute with {self.plans} plans needs an n that they divide, got {group.width}.")
        return self.plans

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None:
                yield Fork(segment.branch, group.width // self.plans if segment.depth == 1 else 1)


class Annealed(RolloutProgram):
    """EAD: the temperature falls along each response, ``max(1 + first - exp(t / decay), least)`` after t tokens, first
    the temperature of sampling; it changes every ``segment_tokens`` tokens (the form is inferred).

    Args:
        decay: tokens in which exp(t / decay) grows by e (default inferred).
        least: the lowest temperature (default inferred).
        segment_tokens: length of a segment in tokens (default inferred).

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, decay: float = 200.0, least: float = 0.5, segment_tokens: int = 16) -> None:
        if not (decay > 0 and least > 0 and segment_tokens > 0):
            raise ValueError("annealed needs decay, least and segment_tokens above 0.")
        self.decay, self.least, self.segment_tokens = decay, least, segment_tokens

    def start(self, group: GroupState) -> int:
        self._first: float | None = None
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if self._first is None:
                self._first = segment.temperature  # of the first segments, which all have the run's
            if segment.status is None:
                yield Fork(segment.branch, temperature=self._at(segment.length))

    def _at(self, t: int) -> float:
        assert self._first is not None
        grown = min(t / self.decay, 50.0)  # far beyond `least`, and no overflow
        return max(1 + self._first - float(np.exp(grown)), self.least)
