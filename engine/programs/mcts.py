"""Tree search over segments, as in DeepSearch (arXiv 2509.25454): expand the frontier node with the best score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..chat.marks import response_text
from ..data.segment import LeafStatus, Origin
from ..parts.resolve import import_object
from .hints import Judge
from .program import (
    WHOLE,
    Action,
    BranchId,
    Call,
    Fork,
    Given,
    GroupState,
    Prune,
    Rewind,
    RolloutProgram,
    SegmentReport,
)


class SolutionCache:
    """Solved responses by prompt, with the log-probs, policy versions and temperature that they were sampled with."""

    def __init__(self) -> None:
        self._solved: dict[Any, Given] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SolutionCache:
        return self  # all copies of a program share it

    def find(self, key: Any) -> Given | None:
        return self._solved.get(key)

    def keep(self, key: Any, solution: Given) -> None:
        self._solved.setdefault(key, solution)

    def state_dict(self) -> dict[str, Any]:
        return {"solved": dict(self._solved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._solved = dict(state["solved"])


class MCTS(RolloutProgram):
    """Tree search for a solved response over segments, as in DeepSearch (arXiv 2509.25454).

    Among all resting branches, the one with the highest
    ``value_weight * tanh(Q(parent)) + entropy_weight * H + depth_weight * sqrt(depth / max_depth)`` is expanded into
    ``branch`` children; H is the mean entropy of its last segment (negative weights prefer confident branches). An
    ended response is judged +1 or -1, which is added to the Q of each ancestor with the weight ``max(depth / leaf's
    depth, min_decay)``. The search ends at the first solution or after ``expansions`` expansions. Then all ended
    responses stay, and the best frontier branches are sampled to their ends, up to ``n`` leaves. A prompt with a cached
    solution (by "id" of its context) gets it as one leaf, however old, and ``n - 1`` plain responses. Checkpoints hold
    the solutions.

    Args:
        judge: function of a response's text and the context that returns its reward, or its name as
            ``file.py:function``; None for the run's verifier. A reward of 1 or more means solved.

    Raises:
        ValueError: an argument is out of range.
    """

    rewinds = True
    needs_entropies = True
    gives_older = True

    def __init__(
        self,
        judge: Judge | str | None = None,
        segment_tokens: int = 256,
        branch: int = 4,
        expansions: int = 16,
        max_depth: int = 16,
        value_weight: float = 0.4,
        entropy_weight: float = -0.5,
        depth_weight: float = 0.01,
        min_decay: float = 0.1,
    ) -> None:
        if min(segment_tokens, branch, expansions, max_depth) < 1:
            raise ValueError("mcts needs segment_tokens, branch, expansions and max_depth >= 1.")
        self.judge = import_object(judge) if isinstance(judge, str) else judge
        self.segment_tokens, self.branch, self.expansions, self.max_depth = (
            segment_tokens,
            branch,
            expansions,
            max_depth,
        )
        self.value_weight, self.entropy_weight, self.depth_weight = value_weight, entropy_weight, depth_weight
        self.min_decay = min_decay
        self.shared = SolutionCache()

    def start(self, group: GroupState) -> int:
        self.judge = self.judge or self.verify
        if self.judge is None:
            raise ValueError("mcts needs a judge, or a run whose verifier judges.")
        if self.tokenizer is None:
            raise ValueError("mcts judges texts, so the engine needs a tokenizer.")
        self._frontier: dict[BranchId, SegmentReport] = {}
        self._value: dict[BranchId, float] = {}
        self._ended: dict[BranchId, SegmentReport] = {}
        self._asked: set[BranchId] = set()
        self._sampled: dict[BranchId, npt.NDArray[Any]] = {}  # log-probs and versions of each branch's own segments
        self._left, self._searching = self.expansions, True
        self._solved: list[BranchId] = []
        self._known = None if self._key() is None else self.shared.find(self._key())
        if self._known is not None:
            self._searching = False
            return max(group.width - 1, 1)
        return self.branch

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        assert self.tokenizer is not None
        assert self.judge is not None
        for segment in finished:
            earlier = self._sampled.get(segment.branch, np.zeros((2, 0)))
            self._sampled[segment.branch] = np.hstack([earlier, [segment.logprobs, segment.versions]])
            if segment.status is None and not self._searching:
                yield Fork(segment.branch, segment_tokens=WHOLE)
            elif segment.status is None and segment.depth < self.max_depth:
                self._frontier[segment.branch] = segment
            elif segment.status is None:
                yield Fork(segment.branch, segment_tokens=WHOLE)  # too deep to expand
            else:
                self._ended[segment.branch] = segment
                if self._searching and segment.status is not LeafStatus.FAILED:
                    self._asked.add(segment.branch)
                    text = response_text(self.tokenizer, segment.response_ids)
                    yield Call(segment.branch, self.judge, (text, self.context))
        if self._known is not None and self._ended:
            solution, self._known = self._known, None
            yield Rewind(min(self._ended), 0, 0, solution)
        yield from self._search(group)

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        self._asked.discard(branch)
        solved = result is not None and float(result) >= 1
        for depth in range(1, len(branch)):
            node = branch[:depth]
            share = max(depth / len(branch), self.min_decay)
            self._value[node] = self._value.get(node, 0.0) + share * (1.0 if solved else -1.0)
        if solved:
            self._solved.append(branch)
        yield from self._search(group)

    def _search(self, group: GroupState) -> Iterable[Action]:
        """Expand a branch, or finish the group if the search is over; do nothing while samples or verdicts are due."""
        if group.sampling or self._asked:
            return
        if self._solved and self._searching:
            self._searching = False
            self._remember(self._ended[min(self._solved)])
        if self._searching and self._left and self._frontier:
            self._left -= 1
            best = max(self._frontier, key=lambda branch: (self._score(branch), branch))
            del self._frontier[best]
            yield Fork(best, self.branch)
            return
        if not self._frontier:
            return
        self._searching = False
        ranked = sorted(self._frontier, key=lambda branch: (-self._score(branch), branch))
        room = max(group.width - group.finished, 1 if not group.finished else 0)
        for i, branch in enumerate(ranked):
            yield Fork(branch, segment_tokens=WHOLE) if i < room else Prune(branch)
        self._frontier = {}

    def _remember(self, leaf: SegmentReport) -> None:
        if self._key() is None:
            return
        path = [self._sampled[leaf.branch[:k]] for k in range(1, len(leaf.branch) + 1)]
        logprobs, versions = np.hstack(path)
        ids, at = leaf.response_ids.tolist(), leaf.temperature
        self.shared.keep(self._key(), Given(ids, Origin.SAMPLED, logprobs.tolist(), versions.astype(int).tolist(), at))

    def _score(self, branch: BranchId) -> float:
        segment = self._frontier[branch]
        value = math.tanh(self._value.get(branch[:-1], 0.0))
        depth = math.sqrt(segment.depth / self.max_depth)
        return self.value_weight * value + self.entropy_weight * segment.entropy + self.depth_weight * depth

    def _key(self) -> Any:
        return self.context.get("id") if isinstance(self.context, dict) else None
