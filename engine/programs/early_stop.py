"""Independent responses that are cut while they are sampled, where a rule finds that they are unlikely to succeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.segment import LeafStatus
from ..parts.resolve import resolve
from .program import Action, BranchId, Finish, Fork, GroupState, Prune, RolloutProgram, SegmentReport

Rule = Callable[[SegmentReport, Any], bool]
"""Tells from a full segment and the problem's row if the response is to be cut."""
THEN = ("judge", "mask", "discard")


def unlikely(segment: SegmentReport, entry: Any, *, below: float = -2.0) -> bool:
    """The mean log-prob of the segment's tokens is under ``below`` (default inferred)."""
    return segment.mean_logprob < below


def repetition(segment: SegmentReport, entry: Any, *, size: int = 16, times: int = 4) -> bool:
    """Some run of ``size`` tokens is ``times`` times in the response (defaults inferred)."""
    if segment.length < size:
        return False
    runs = np.lib.stride_tricks.sliding_window_view(segment.response_ids, size)
    return bool(np.unique(runs, axis=0, return_counts=True)[1].max() >= times)


def longer(segment: SegmentReport, entry: Any, *, column: str, factor: float = 2.0) -> bool:
    """The response is longer than ``factor`` times the number of tokens in a column of the problem's row, such as the
    length of a known solution (default inferred).

    Raises:
        ValueError: the row has no such number.
    """
    length = entry.get(column) if isinstance(entry, Mapping) else None
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise ValueError(f"the rule 'longer' of early_stop needs a column '{column}' with a number of tokens")
    return segment.length > factor * length


RULES: dict[str, Callable[..., bool]] = {"unlikely": unlikely, "repetition": repetition, "longer": longer}


class EarlyStop(RolloutProgram):
    """Early abort (as in MASA and ActiveVLN): ``n`` independent responses, each tested by a rule after every
    ``segment_tokens`` tokens and cut where it is unlikely to succeed; its keys are free at once.

    A cut response is judged as it is (``then`` = "judge", with the status of one that is too long), judged but in no
    update ("mask"), or discarded. Where all of a group would be discarded, they are masked: a group cannot be empty,
    and no update sees it. `rollout/cut` counts the responses that were cut, and `rollout/cut_tokens` their tokens.

    Args:
        rule: "unlikely" (the option ``below``), "repetition" (``size``, ``times``), "longer" (``column``, ``factor``),
            or ``file.py:function`` of a `SegmentReport` and the problem's row, which returns whether to cut.
        rule_options: options of the rule.
        segment_tokens: length of a segment in tokens (default inferred).
        then: see above (default inferred).

    Raises:
        ValueError: segment_tokens is below 1, or there is no such way to treat a cut response.
        UserError: there is no such rule, or it has no such option.
    """

    def __init__(
        self,
        rule: str = "repetition",
        rule_options: Mapping[str, Any] | None = None,
        segment_tokens: int = 256,
        then: str = "judge",
    ) -> None:
        if segment_tokens < 1 or then not in THEN:
            raise ValueError(f"early_stop needs segment_tokens >= 1, and then of {', '.join(THEN)}.")
        self.rule: Rule = resolve(
            "rollout.program_options.rule", rule, rule_options, parts=RULES, inputs=("segment", "entry"),
            options_key="rollout.program_options.rule_options",
        )  # fmt: skip
        self.segment_tokens, self.then = segment_tokens, then

    def start(self, group: GroupState) -> int:
        self._cut: list[BranchId] = []
        self.counts = {"cut": 0, "cut_tokens": 0}
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is not None:
                continue
            if self.rule(segment, self.context):
                self._cut.append(segment.branch)
                self.count(cut=1, cut_tokens=segment.length)
                yield Finish(segment.branch, LeafStatus.LENGTH, train=None if self.then == "judge" else False)
            else:
                yield Fork(segment.branch)

    def ended(self, group: GroupState) -> Iterable[Action]:
        cut, self._cut = self._cut, []
        if self.then == "discard" and len(cut) < group.leaves:
            yield from (Prune(branch) for branch in sorted(cut))
