"""Responses whose segment ends are probed: short continuations from there estimate how far the response has come."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ..data.segment import LeafStatus
from .program import (
    WHOLE,
    Action,
    BranchId,
    Finish,
    Fork,
    Given,
    GroupState,
    Prune,
    Rewind,
    RolloutProgram,
    SegmentReport,
)


class PrefixValueProbe(RolloutProgram):
    """Probes of prefixes (MRT, 8x): ``n`` responses, and continuations from the prompt and from each segment's end but
    the last, which estimate the value of the prefix and are not trained on.

    Each probe begins with the text ``ask``, which makes the policy answer at once (MRT); without a text it continues
    freely (8x). The prompt is probed once a group. The advantage `progress_bonus` reads MRT's values, and
    `segment_value_diff` those of 8x. A segment's end that leaves no room for ``ask`` is not probed, so
    `rollout.max_new_tokens` should be above the longest response by ``ask`` and ``answer_tokens``.

    Args:
        probes: continuations from each place (default inferred).
        segment_tokens: length of a segment in tokens; 0: segments end at ``stop`` alone (default inferred).
        stop: texts that end a segment too, such as "\\n\\n" for steps, or the words that begin another attempt.
        ask: the text at the beginning of a probe; the words are inferred. Empty: none.
        answer_tokens: longest answer of a probe in tokens; 0: as long as any response (default inferred).

    Raises:
        ValueError: a number is negative, there are no probes, or nothing ends a segment.
    """

    rewinds = True

    def __init__(
        self,
        probes: int = 4,
        segment_tokens: int = 256,
        stop: Sequence[str] = (),
        ask: str = "\nTime is up. Answer now.\n</think>\n\n",
        answer_tokens: int = 64,
    ) -> None:
        if probes < 1 or min(segment_tokens, answer_tokens) < 0:
            raise ValueError("prefix_value_probe needs probes >= 1, and segment_tokens and answer_tokens >= 0.")
        if not segment_tokens and not stop:
            raise ValueError("prefix_value_probe needs segment_tokens, or texts in stop that end a segment.")
        self.probes, self.segment_tokens, self.segment_stop = probes, segment_tokens or None, tuple(stop)
        self.ask, self.answer_tokens = ask, answer_tokens

    def start(self, group: GroupState) -> int:
        if self.ask and self.tokenizer is None:
            raise ValueError("prefix_value_probe puts a text into responses, so the engine needs a tokenizer.")
        self._ends: dict[BranchId, int] = {}  # of running probes: the response length at which they end
        self._made: dict[BranchId, int] = {}  # of each response: rewinds so far
        return group.width

    def decide(
        self, group: GroupState, finished: Sequence[SegmentReport]
    ) -> Generator[Action, Sequence[BranchId], None]:
        for segment in finished:
            branch = segment.branch
            if branch in self._ends:
                if segment.status is not None:
                    del self._ends[branch]
                elif segment.length < self._ends[branch]:  # a text in `stop` ended the segment
                    yield Fork(branch, segment_tokens=self._ends[branch] - segment.length)
                else:
                    del self._ends[branch]
                    yield Finish(branch, LeafStatus.LENGTH)
                continue
            # The place where this segment began: a branch can be rewound only to before its end.
            if segment.status is not LeafStatus.FAILED and (segment.depth > 1 or branch == (0,)):
                yield from self._probe(branch, segment.boundaries[-1])
            if segment.status is None:
                yield Fork(branch)

    def _probe(self, branch: BranchId, cut: int) -> Generator[Action, Sequence[BranchId], None]:
        ask = self._asked()
        limit = self.answer_tokens or WHOLE
        append = Given(ask) if ask else None
        number = self._made[branch] = self._made.get(branch, 0) + 1
        probes = yield Rewind(branch, cut, self.probes, append, segment_tokens=limit, train=False)
        if not probes:  # the engine ended it where the text has no room: nothing was asked there
            yield Prune((*branch, -number))
        self._ends |= {probe: cut + len(ask) + limit for probe in probes}

    def _asked(self) -> list[int]:
        """Return the token ids of the text that begins a probe."""
        if not self.ask:
            return []
        assert self.tokenizer is not None
        return list(self.tokenizer.encode(self.ask, add_special_tokens=False))
