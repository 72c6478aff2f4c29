"""Hint ladders: while no response solves the problem, the group is sampled again after a longer part of a solution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..chat.marks import response_text
from ..parts.resolve import import_object
from .program import Action, BranchId, Call, Given, GroupState, Prune, Rewind, RolloutProgram, SegmentReport

Judge = Callable[[str, Any], float | None]


class HintLadder(RolloutProgram):
    """Independent responses; while none solves the problem, as many again after a longer prefix of the solution.

    The prefix follows the prompt as injected tokens, which are not trained on. The prompt's context must be a mapping
    with the text ``solution``. There is no single source; the default fractions are inferred.

    Args:
        judge: function of a response's text and the context that returns its reward, or its name as
            ``file.py:function``; None for the run's verifier. A reward of 1 or more means solved.
        fractions: part of the solution's tokens that each rung appends, ascending.
        keep_failed: keep the responses of earlier rungs; otherwise only those of the last rung are leaves.

    Raises:
        ValueError: fractions do not rise within (0, 1].
    """

    rewinds = True

    def __init__(
        self, judge: Judge | str | None = None, fractions: Sequence[float] = (0.25, 0.5, 0.75), keep_failed: bool = True
    ) -> None:
        if list(fractions) != sorted(set(fractions)) or not all(0 < f <= 1 for f in fractions):
            raise ValueError(f"hints needs fractions that rise within (0, 1], got {list(fractions)}.")
        self.judge = import_object(judge) if isinstance(judge, str) else judge
        self.fractions, self.keep_failed = tuple(fractions), keep_failed

    def start(self, group: GroupState) -> int:
        self.judge = self.judge or self.verify
        if self.judge is None:
            raise ValueError("hints needs a judge, or a run whose verifier judges.")
        if self.tokenizer is None or not isinstance(self.context, Mapping) or "solution" not in self.context:
            raise ValueError(
                "hints needs a tokenizer, and contexts that are mappings with a 'solution'; add the column to the data."
            )
        self._rung, self._missing, self._solved = 0, group.width, False
        self._leaves: list[BranchId] = []
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        assert self.tokenizer is not None
        assert self.judge is not None
        for segment in finished:
            text = response_text(self.tokenizer, segment.response_ids)
            yield Call(segment.branch, self.judge, (text, self.context))

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        self._leaves.append(branch)
        self._solved |= result is not None and float(result) >= 1
        self._missing -= 1
        if self._missing or self._solved or self._rung == len(self.fractions):
            return
        assert self.tokenizer is not None
        solution = self.tokenizer.encode(self.context["solution"], add_special_tokens=False)
        hint = solution[: max(1, round(self.fractions[self._rung] * len(solution)))]
        self._rung, self._missing = self._rung + 1, group.width
        yield Rewind(min(self._leaves), 0, group.width, Given(hint))
        if not self.keep_failed:
            yield from (Prune(leaf) for leaf in self._leaves)
            self._leaves = []
