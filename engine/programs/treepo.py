"""TreePO (arXiv 2508.17445): responses branch at the ends of fixed-length segments until the group is wide enough.

A prompt's branches advance in rounds of one segment. After a round that left ``active`` branches unfinished and ended
``finished_now``, the next one has ``max(active, min(max(W - finished, 0), b * finished_now + b * active))`` branches,
shared evenly (the last takes the remainder) or by their log-probs. If no branch is active and fewer than ``W`` have
finished, a finished one is rewound to a random segment boundary and continued from there. There are ``W = n`` leaves.
Each prompt has its own rounds: its branches advance together, and no prompt waits for another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.segment import LeafStatus
from .program import Action, Finish, Fork, GroupState, Rewind, RolloutProgram, SegmentReport

SHARES = {"even": 0, "likely": 1, "unlikely": -1}


class TreePO(RolloutProgram):
    """TreePO (arXiv 2508.17445): responses branch at the ends of fixed-length segments until there are ``n``.

    Args:
        segment_tokens: length of a segment in tokens.
        max_depth: segments of the longest response; a longer one ends there with status LENGTH.
        branch: branches that one may become at a boundary, and branches that a rewind starts.
        init: branches sampled from the prompt (at most n).
        share: division of a round's branches: "even", or more of them for segments that were "likely" or "unlikely",
            by a softmax of the mean log-prob; each gets at least one.
        share_temperature: temperature of that softmax.
        repetition: end a response, as LENGTH, if a text of this many characters occurs ``repeats`` times in it; 0 for
            never. Needs a tokenizer, as does ``answer``.
        repeats: see ``repetition``.
        answer: end a response, as STOP, if its text matches this regular expression, such as ``Answer: .+``.

    Raises:
        ValueError: a number is out of range, or ``share`` is unknown.
    """

    rewinds = True

    def __init__(
        self,
        segment_tokens: int = 512,
        max_depth: int = 14,
        branch: int = 2,
        init: int = 2,
        share: str = "even",
        share_temperature: float = 1.0,
        repetition: int = 0,
        repeats: int = 8,
        answer: str = "",
    ) -> None:
        sizes = {"segment_tokens": segment_tokens, "max_depth": max_depth, "branch": branch, "init": init}
        for name, value in (sizes | {"repeats": repeats}).items():
            if value < 1:
                raise ValueError(f"treepo needs {name} >= 1, got {value}.")
        if share not in SHARES or share_temperature <= 0:
            raise ValueError(f"treepo needs share of {', '.join(SHARES)} and a positive share_temperature.")
        self.share, self.share_temperature = share, share_temperature
        self.repetition, self.repeats = repetition, repeats
        self.answer = re.compile(answer, re.DOTALL) if answer else None
        self.segment_tokens = segment_tokens
        self.max_depth, self.branch, self.init = max_depth, branch, init

    def start(self, group: GroupState) -> int:
        if self.tokenizer is None and (self.repetition or self.answer):
            raise ValueError("treepo looks for repetition and answer in texts, so the engine needs a tokenizer.")
        self._rng = np.random.default_rng(group.seed & 0xFFFFFFFFFFFFFFFF)
        self._resting: list[SegmentReport] = []
        self._leaves: list[SegmentReport] = []
        self._finished_now = 0
        return min(self.init, group.width)

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        actions: list[Action] = []
        for segment in finished:
            end = segment.status if segment.status is not None else self._ends(segment)
            if end is None:
                self._resting.append(segment)
                continue
            if segment.status is None:
                actions.append(Finish(segment.branch, end))
            self._leaves.append(segment)
            self._finished_now += 1
        if group.sampling:
            return actions  # the round continues
        if self._resting:
            return actions + self._next_round(group.width)
        if len(self._leaves) < group.width:
            actions.append(self._fall_back(group.width - len(self._leaves)))
        return actions

    def _next_round(self, width: int) -> list[Action]:
        # in depth-first order, because the order of arrival may depend on the batch
        active = sorted(self._resting, key=lambda segment: segment.branch)
        room = max(width - len(self._leaves), 0)
        budget = max(len(active), min(room, self.branch * (self._finished_now + len(active))))
        self._resting, self._finished_now = [], 0
        shares = self._shares(budget, np.array([segment.mean_logprob for segment in active]))
        return [Fork(segment.branch, int(n)) for segment, n in zip(active, shares, strict=True)]

    def _shares(self, budget: int, logprob: npt.NDArray[Any]) -> npt.NDArray[Any]:  # [active] -> [active] int64
        active = len(logprob)
        shares = np.full(active, 1 if SHARES[self.share] else budget // active)
        if not SHARES[self.share]:
            shares[-1] += budget % active
            return shares
        score = SHARES[self.share] * logprob / self.share_temperature
        weight = np.exp(score - score.max())
        extra = (budget - active) * weight / weight.sum()  # in addition to the one that each gets
        shares += np.floor(extra).astype(np.int64)
        largest = np.argsort(-(extra - np.floor(extra)), kind="stable")
        shares[largest[: budget - shares.sum()]] += 1
        return shares

    def _ends(self, segment: SegmentReport) -> LeafStatus | None:
        """Return the status with which a response ends at a full segment; None if it continues."""
        if self.repetition or self.answer:
            assert self.tokenizer is not None
            text = self.tokenizer.decode(segment.response_ids)
            if self.repetition and _repeats(text, self.repetition) >= self.repeats:
                return LeafStatus.LENGTH
            if self.answer and self.answer.search(text):
                return LeafStatus.STOP
        return None if segment.depth < self.max_depth else LeafStatus.LENGTH

    def _fall_back(self, missing: int) -> Action:
        self._finished_now = 0
        leaves = sorted(self._leaves, key=lambda segment: segment.branch)
        leaf = leaves[self._rng.integers(len(leaves))]
        boundaries = [b for b in leaf.boundaries if b == 0 or b < leaf.length]
        boundary = boundaries[self._rng.integers(len(boundaries))]
        return Rewind(leaf.branch, boundary, min(self.branch, missing))


def _repeats(text: str, length: int) -> int:
    """Return the number of occurrences of the most frequent text of ``length`` characters."""
    runs = Counter(text[i : i + length] for i in range(len(text) - length + 1))
    return max(runs.values(), default=0)
