"""ARPO (arXiv 2507.19849): responses with tools branch where a tool's answer has made the policy unsure."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ..data.segment import LeafStatus
from .program import WHOLE, Action, BranchId, Fork, GroupState, Rewind, SegmentReport
from .tools import Tool, ToolTurns


class ARPO(ToolTurns):
    """Turns with tools; see `ToolTurns` for the arguments it shares.

    The first ``probe_tokens`` after each observation tell how unsure the policy is: H, the mean entropy over its ten
    likeliest tokens, divided by log V. With ``dH`` its rise since the response's own first tokens and ``u`` uniform in
    [0, 1), the response branches into ``beam`` from the observation on where ``clip(u - weight * dH, 0, 1) <=
    probability``. ``initial`` responses are begun, and each may branch into its share of ``n``; when all have ended,
    fresh ones fill the group.

    Raises:
        ValueError: an argument is out of range.
    """

    top_logprobs = 10
    rewinds = True

    def __init__(
        self,
        tool: Tool | str,
        initial: int = 8,
        beam: int = 2,
        probability: float = 0.5,
        weight: float = 0.2,
        probe_tokens: int = 20,
        **turns: Any,
    ) -> None:
        super().__init__(tool, **turns)
        if min(initial, beam, probe_tokens) < 1:
            raise ValueError("arpo needs initial, beam and probe_tokens >= 1.")
        self.initial, self.beam, self.probability, self.weight = initial, beam, probability, weight
        self.segment_tokens = self.probe_tokens = probe_tokens

    def start(self, group: GroupState) -> int:
        super().start(group)
        begun = min(self.initial, group.width)
        share, rest = divmod(group.width - begun, begun)
        # Responses may branch as often as their share of the group says, so none depends on how fast the others are.
        self._room: dict[BranchId, int] = {(i,): share + (i < rest) for i in range(begun)}
        self._length: dict[BranchId, int] = {}  # of the response, where it called
        self._first: dict[BranchId, float] = {}  # the entropy at the beginning of responses
        self._probing: dict[BranchId, int] = {}  # where the observation before the probe ends
        return begun

    def decide(
        self, group: GroupState, finished: Sequence[SegmentReport]
    ) -> Generator[Action, Sequence[BranchId], None]:
        for segment in finished:
            branch = segment.branch
            rise = self._rise(segment)
            begin = self._probing.pop(branch, None)
            if begin is not None and rise is not None and (more := min(self.beam - 1, self._room.get(branch, 0))) > 0:
                rng = np.random.default_rng([group.seed & 0xFFFFFFFFFFFFFFFF, begin, *(i % 2**32 for i in branch)])
                if min(max(rng.random() - self.weight * rise, 0.0), 1.0) <= self.probability:
                    children = yield Rewind(branch, begin, more, segment_tokens=WHOLE)
                    self._share_room(branch, children)
            if segment.status is None:
                yield self.turn(segment) if segment.stop else Fork(branch, segment_tokens=WHOLE)

    def ended(self, group: GroupState) -> Iterable[Action]:
        if group.leaves < group.width:
            yield Rewind((0,), 0, group.width - group.leaves, segment_tokens=WHOLE)

    def _share_room(self, source: BranchId, children: Sequence[BranchId]) -> None:
        """The branches made get their share of what the source may still branch."""
        share, rest = divmod(self._room[source] - len(children), len(children) + 1)
        self._room[source] = share
        self._room |= {child: share + (i < rest) for i, child in enumerate(children)}

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        del self._asked[branch]
        observation = self.observed(result)
        self._probing[branch] = self._length[branch] + len(observation.token_ids)
        yield Fork(branch, append=observation)

    def turn(self, segment: SegmentReport) -> Action:
        self._length[segment.branch] = segment.length
        return super().turn(segment)

    def _rise(self, segment: SegmentReport) -> float | None:
        """How much more unsure the segment's first tokens are than the response's; None without a measure."""
        some = segment.top_logprobs[: self.probe_tokens]
        if segment.status is LeafStatus.FAILED or not len(some):
            return None
        entropy = float(-(np.exp(some) * some).sum(-1).mean() / math.log(self._vocabulary()))
        if len(segment.token_ids) == segment.length:
            self._first[segment.branch] = entropy
        ancestors = (segment.branch[:k] for k in range(len(segment.branch), 0, -1))
        return entropy - next((self._first[key] for key in ancestors if key in self._first), entropy)

    def _vocabulary(self) -> int:
        assert self.tokenizer is not None
        return max(len(self.tokenizer), 2)
