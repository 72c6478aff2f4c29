"""Responses that begin with a part of a given solution (Prefix-RFT; resets as in DR-PO), or end with a question."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np

from ..chat.marks import response_text
from ..data.segment import LeafStatus
from ..parts.shares import length_in, share_in
from .program import Action, BranchId, Finish, Given, GroupState, Rewind, RolloutProgram, SegmentReport


class DemoPrefix(RolloutProgram):
    """Independent responses, some of which begin with the first tokens of the problem's solution, a random share of
    them for each (Prefix-RFT with one such member; a reset to states of demonstrations, as in DR-PO, with more).

    The given tokens count as injected: they are in an update only where its selection says so. A part that leaves no
    room for a sampled token gives an empty response; lower ``high`` for long solutions. The shares do not depend on the
    step (inferred).

    Args:
        column: of the problem's row, with the solution's text.
        members: responses that begin with a part of it, of n.
        low, high: bounds of the share of its tokens (defaults inferred).

    Raises:
        ValueError: members is below 1, or the bounds are not 0 < low <= high <= 1.
    """

    rewinds = True

    def __init__(self, column: str = "solution", members: int = 1, low: float = 0.1, high: float = 0.9) -> None:
        if members < 1 or not 0 < low <= high <= 1:
            raise ValueError(f"demo_prefix needs members >= 1 and 0 < low <= high <= 1, got {members}, {low}, {high}.")
        self.column, self.members, self.low, self.high = column, members, low, high

    def start(self, group: GroupState) -> int:
        if self.members >= group.width:
            raise ValueError(f"demo_prefix with {self.members} members needs n above that; set rollout.n or members.")
        if self.tokenizer is None or not isinstance(self.context, Mapping) or self.column not in self.context:
            raise ValueError(
                f"demo_prefix needs a tokenizer, and problems with a column '{self.column}'; name it in `column`."
            )
        return group.width - self.members

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        if (first := _first(finished)) is None:
            return
        assert self.tokenizer is not None
        solution = self.tokenizer.encode(str(self.context[self.column]), add_special_tokens=False)
        rng = np.random.default_rng(group.seed & 0xFFFFFFFFFFFFFFFF)
        for share in rng.uniform(self.low, self.high, self.members).tolist():
            yield Rewind(first.branch, 0, 1, Given(solution[: max(1, round(share * len(solution)))]))


class Foresee(RolloutProgram):
    """MASA (arXiv 2510.03259): independent responses, some of which begin with a question about the others, such as how
    many are right.

    The question is not trained on. The shaping `foresight` makes the reward of an answer. With ``gate`` one of the
    others is sampled first, then the answers to the question, and the rest only if a problem is not foreseen to be
    solved always or never: if the mean of the answers that are a share is above 0 and below 1, or none is one. A group
    that stops there has 1 + ``members`` responses. With ``cut`` too the first is sampled before the answers; the rest
    end at ``cut`` times the mean of the lengths that these foresee, the second number of each, and are judged as they
    are. Without a length none is cut. `rollout/cut` counts the responses that were cut, `rollout/cut_tokens` their
    tokens. MASA foresees the whole group before it is sampled.

    Args:
        question: the text that begins a response about the others (inferred).
        members: responses that begin with it, of n (default inferred).
        gate: see above; the bounds 0 and 1 are inferred.
        cut: see above; 0: none is cut. The question then has to ask for a share and a number of tokens.

    Raises:
        ValueError: the question is empty, members is below 1, or cut is negative.
    """

    rewinds = True

    def __init__(
        self,
        question: str = "What share of my attempts will be right, from 0 to 1? Share:",
        members: int = 2,
        gate: bool = False,
        cut: float = 0.0,
    ) -> None:
        if not question or members < 1 or cut < 0:
            raise ValueError("foresee needs a question, members >= 1 and cut >= 0.")
        self.question, self.members, self.gate, self.cut = question, members, gate, cut

    def start(self, group: GroupState) -> int:
        if self.tokenizer is None:
            raise ValueError("foresee puts a text into responses, so the engine needs a tokenizer.")
        if self.members >= group.width:
            raise ValueError(f"foresee with {self.members} members needs n above that; set rollout.n or members.")
        self._waiting: set[BranchId] = set()
        self._shares: list[float] = []
        self._lengths: list[float] = []
        self.counts = {"cut": 0, "cut_tokens": 0} if self.cut else {}
        return 1 if self.gate or self.cut else group.width - self.members

    def decide(
        self, group: GroupState, finished: Sequence[SegmentReport]
    ) -> Generator[Action, Sequence[BranchId], None]:
        assert self.tokenizer is not None
        for segment in finished:
            if segment.status is None:  # only the rest have segments, which end at the length that is cut
                self.count(cut=1, cut_tokens=segment.length)
                yield Finish(segment.branch, LeafStatus.LENGTH)
        answered = [segment for segment in finished if segment.branch in self._waiting]
        for segment in answered:
            self._waiting.remove(segment.branch)
            share, length = share_in(text := self._said(segment)), length_in(text)
            self._shares += [] if share is None else [share]
            self._lengths += [] if length is None else [length]
        if (first := _first(finished)) is not None:
            question = Given(self.tokenizer.encode(self.question, add_special_tokens=False))
            self._waiting = set((yield Rewind(first.branch, 0, self.members, question)))
        elif not answered:
            return
        rest = group.width - 1 - self.members
        if (self.gate or self.cut) and not self._waiting and rest and self._open():
            yield Rewind((0,), 0, rest, segment_tokens=self._longest())

    def _said(self, segment: SegmentReport) -> str:
        """Return what a response about the others answers."""
        assert self.tokenizer is not None
        return response_text(self.tokenizer, segment.token_ids)

    def _open(self) -> bool:
        """Return whether the others are worth sampling."""
        return not (self.gate and self._shares) or 0 < sum(self._shares) / len(self._shares) < 1

    def _longest(self) -> int | None:
        """Return the length at which the rest are cut; None if they are not."""
        if not (self.cut and self._lengths):
            return None
        return max(1, round(self.cut * sum(self._lengths) / len(self._lengths)))


def _first(finished: Sequence[SegmentReport]) -> SegmentReport | None:
    """Return the first response, once: when it has ended; None if it failed, or for other reports."""
    return next((s for s in finished if s.branch == (0,) and s.status not in (None, LeafStatus.FAILED)), None)
