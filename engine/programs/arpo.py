"""ARPO (arXiv 2507.19849): responses with tools branch after a tool's answer that raised the policy's entropy."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np

from ..data.segment import LeafStatus
from .program import WHOLE, Action, BranchId, Fork, GroupState, Rewind, SegmentReport
from .tools import Tool, ToolTurns


class ARPO(ToolTurns):
    """ARPO (arXiv 2507.19849): tool turns that branch after a tool's answer that raised the policy's entropy.

    The first ``probe_tokens`` after each observation measure H, the mean entropy over the ten likeliest tokens divided
    by log V. With ``dH`` its rise since the first tokens of the response and ``u`` uniform in [0, 1), the response
    branches into ``beam`` at the end of the observation if ``clip(u - weight * dH, 0, 1) <= probability``. A group
    begins with ``initial`` responses, and each may branch into its share of ``n``; after all have ended, new responses
    from the prompt fill the group. The further arguments are those of `ToolTurns`.

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
        # each response has a fixed share of the group, so that none depends on the speed of the others
        self._room: dict[BranchId, int] = {(i,): share + (i < rest) for i in range(begun)}
        self._length: dict[BranchId, int] = {}  # response tokens at its last call
        self._first: dict[BranchId, float] = {}  # entropy of the first tokens of a response
        self._probing: dict[BranchId, int] = {}  # response length at the end of the observation
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
        """Divide the branches that ``source`` may still make among it and its ``children``."""
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
        """Return the entropy of the segment's first tokens minus that of the response's; None if it is not known."""
        logprobs = segment.top_logprobs[: self.probe_tokens]
        if segment.status is LeafStatus.FAILED or not len(logprobs):
            return None
        entropy = float(-(np.exp(logprobs) * logprobs).sum(-1).mean() / math.log(self._vocabulary()))
        if len(segment.token_ids) == segment.length:
            self._first[segment.branch] = entropy
        ancestors = (segment.branch[:k] for k in range(len(segment.branch), 0, -1))
        return entropy - next((self._first[key] for key in ancestors if key in self._first), entropy)

    def _vocabulary(self) -> int:
        assert self.tokenizer is not None
        return max(len(self.tokenizer), 2)
