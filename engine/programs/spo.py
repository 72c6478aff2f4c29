"""SPO (arXiv 2505.23564): the value of a segment is estimated from continuations sampled at its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..data.segment import LeafStatus
from .program import Action, Fork, GroupState, Rewind, RolloutProgram, SegmentReport


class SPOTree(RolloutProgram):
    """SPO-tree (arXiv 2505.23564): fixed-length segments with a fixed number of children at each depth.

    Branches of the last level are sampled to their ends.

    Args:
        branch_factors: children of the prompt, of the first segments, and so on. ``n`` must be their product; there
            are fewer leaves if responses end early.
        segment_tokens: length of a segment in tokens.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, branch_factors: Sequence[int] = (6, 6, 6), segment_tokens: int = 256) -> None:
        if not branch_factors or min(*branch_factors, segment_tokens) < 1:
            raise ValueError(f"spo_tree needs branch_factors and segment_tokens >= 1, got {list(branch_factors)}.")
        self.branch_factors = tuple(branch_factors)
        self.segment_tokens = segment_tokens

    def start(self, group: GroupState) -> int:
        leaves = math.prod(self.branch_factors)
        if group.width != leaves:
            raise ValueError(
                f"spo_tree with branch_factors {self.branch_factors} makes {leaves} leaves; set rollout.n to that."
            )
        return self.branch_factors[0]

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is None:
                inner = segment.depth < len(self.branch_factors)
                yield Fork(segment.branch, self.branch_factors[segment.depth] if inner else 1)


class SPOChain(RolloutProgram):
    """SPO-chain (arXiv 2505.23564): whole responses, and continuations from cuts, which estimate the cuts' values and
    are not trained on.

    A response is cut whenever ``cut_after`` tokens less likely than ``threshold`` have been sampled since the last cut.
    Its beginning counts as a cut. The credit that reads the values is `segment_value_diff`.

    Args:
        chains: responses that are cut.
        samples: continuations from each cut.
        cut_after: uncertain tokens between two cuts.
        threshold: probability below which a token counts as uncertain.
        max_cuts: cuts of one response; later ones are left out.

    Raises:
        ValueError: an argument is out of range.
    """

    rewinds = True

    def __init__(
        self, chains: int = 1, samples: int = 4, cut_after: int = 5, threshold: float = 0.9, max_cuts: int = 16
    ) -> None:
        if min(chains, samples, cut_after, max_cuts) < 1 or not 0 < threshold <= 1:
            raise ValueError("spo_chain needs chains, samples, cut_after, max_cuts >= 1 and threshold in (0, 1].")
        self.chains, self.samples, self.cut_after = chains, samples, cut_after
        self.threshold, self.max_cuts = threshold, max_cuts

    def start(self, group: GroupState) -> int:
        return self.chains

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if len(segment.branch) == 1 and segment.status is not LeafStatus.FAILED:
                for cut in [0, *self.cuts(segment.logprobs)]:
                    yield Rewind(segment.branch, cut, self.samples, train=False)

    def cuts(self, logprobs: Any) -> list[int]:
        """Return the response lengths at which segments end."""
        unsure = np.flatnonzero(np.exp(logprobs) < self.threshold) + 1
        ends = unsure[self.cut_after - 1 :: self.cut_after]
        return ends[ends < len(logprobs)][: self.max_cuts].tolist()
