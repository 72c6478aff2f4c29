"""TreePO (arXiv 2508.17445): responses branch at the ends of fixed-length segments until the group is wide enough.

A prompt's branches advance in rounds of one segment. After a round that left ``active`` branches unfinished and ended
``finished_now``, the next one has ``max(active, min(max(W - finished, 0), b * finished_now + b * active))`` branches,
shared evenly (the last takes the remainder). When no branch is active and fewer than ``W`` have finished, one of the
finished is rewound to a random segment boundary and goes on from there. Exactly ``W = n`` leaves come out.
Rounds are the prompt's own: its branches advance in step anyway, and no prompt waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..tree import LeafStatus
from .program import Action, Finish, Fork, GroupState, Rewind, RolloutProgram, SegmentReport


class TreePO(RolloutProgram):
    """Segment-tree rollouts.

    Args:
        segment_tokens: length of a segment.
        max_depth: segments of the longest response; longer ones end there with status LENGTH.
        branch: how many branches one may become at a boundary, and how many a rewind starts.
        init: branches sampled from the prompt (at most n).

    Raises:
        ValueError: one of them is below 1.
    """

    rewinds = True

    def __init__(self, segment_tokens: int = 512, max_depth: int = 14, branch: int = 2, init: int = 2) -> None:
        given = {"segment_tokens": segment_tokens, "max_depth": max_depth, "branch": branch, "init": init}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"treepo needs {name} >= 1, got {value}.")
        self.segment_tokens = segment_tokens
        self.max_depth, self.branch, self.init = max_depth, branch, init

    def start(self, group: GroupState) -> int:
        self._rng = np.random.default_rng(group.seed & 0xFFFFFFFFFFFFFFFF)
        self._resting: list[SegmentReport] = []
        self._leaves: list[SegmentReport] = []
        self._finished_now = 0
        return min(self.init, group.width)

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        actions: list[Action] = []
        for segment in finished:
            if segment.status is None and segment.depth < self.max_depth:
                self._resting.append(segment)
                continue
            if segment.status is None:
                actions.append(Finish(segment.branch, LeafStatus.LENGTH))
            self._leaves.append(segment)
            self._finished_now += 1
        if group.sampling:
            return actions  # the round goes on
        if self._resting:
            return actions + self._next_round(group.width)
        if len(self._leaves) < group.width:
            actions.append(self._fall_back(group.width - len(self._leaves)))
        return actions

    def _next_round(self, width: int) -> list[Action]:
        # in the order of the tree, not of arrival, which may depend on the batch
        active = sorted(segment.branch for segment in self._resting)
        room = max(width - len(self._leaves), 0)
        budget = max(len(active), min(room, self.branch * (self._finished_now + len(active))))
        share, rest = divmod(budget, len(active))
        self._resting, self._finished_now = [], 0
        return [Fork(branch, share + (rest if branch == active[-1] else 0)) for branch in active]

    def _fall_back(self, missing: int) -> Action:
        self._finished_now = 0
        leaves = sorted(self._leaves, key=lambda segment: segment.branch)
        leaf = leaves[self._rng.integers(len(leaves))]
        boundaries = [b for b in leaf.boundaries if b == 0 or b < leaf.length]
        boundary = boundaries[self._rng.integers(len(boundaries))]
        return Rewind(leaf.branch, boundary, min(self.branch, missing))
