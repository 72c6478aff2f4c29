"""EPTree of TreeRL (arXiv 2506.11902): responses branch again where the token sampled was the least likely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..data.segment import LeafStatus
from .program import Action, BranchId, GroupState, Rewind, RolloutProgram, SegmentReport


class EPTree(RolloutProgram):
    """``chains`` responses first; then ``rounds`` times, in the tree of each of them, the ``forks`` tokens with the
    highest ``-log p`` are sampled anew, ``continuations`` times each.

    Leaves: ``chains * (1 + forks * rounds * continuations)``; ``n`` must be that.

    Raises:
        ValueError: an argument is below 1.
    """

    rewinds = True

    def __init__(self, chains: int = 6, forks: int = 2, rounds: int = 1, continuations: int = 2) -> None:
        if min(chains, forks, rounds, continuations) < 1:
            raise ValueError("eptree needs chains, forks, rounds and continuations >= 1.")
        self.chains, self.forks, self.rounds, self.continuations = chains, forks, rounds, continuations

    def start(self, group: GroupState) -> int:
        leaves = self.chains * (1 + self.forks * self.rounds * self.continuations)
        if group.width != leaves:
            raise ValueError(f"eptree with these options makes {leaves} leaves; set n to that.")
        self._round = 0
        self._tokens: dict[int, list[tuple[float, BranchId, int]]] = {}  # chain -> log-prob, leaf, response length
        return self.chains

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is not LeafStatus.FAILED:
                first = segment.length - len(segment.token_ids)
                known = self._tokens.setdefault(segment.branch[0], [])
                known += [(float(lp), segment.branch, first + i) for i, lp in enumerate(segment.logprobs)]
        if group.sampling or self._round == self.rounds:
            return
        self._round += 1
        for chain in sorted(self._tokens):
            tokens = sorted(self._tokens[chain])
            self._tokens[chain] = tokens[self.forks :]  # none is taken twice
            for _, branch, length in tokens[: self.forks]:
                yield Rewind(branch, length, self.continuations)


class CURE(RolloutProgram):
    """CURE's first stage: finished responses are sampled anew from a token at which the policy was unsure.

    Of the ``candidates`` tokens with the highest entropy one is drawn, and ``branches`` responses go on from before it.
    ``n`` counts originals and branches, so it is a multiple of ``1 + branches``.

    Raises:
        ValueError: an argument is below 1.
    """

    rewinds = True
    needs_entropies = True

    def __init__(self, branches: int = 1, candidates: int = 20) -> None:
        if min(branches, candidates) < 1:
            raise ValueError("cure needs branches and candidates >= 1.")
        self.branches, self.candidates = branches, candidates

    def start(self, group: GroupState) -> int:
        if group.width % (1 + self.branches):
            raise ValueError(f"cure with branches = {self.branches} needs n to be a multiple of {1 + self.branches}.")
        return group.width // (1 + self.branches)

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if len(segment.branch) == 1 and segment.status is not LeafStatus.FAILED:
                rng = np.random.default_rng([group.seed & 0xFFFFFFFFFFFFFFFF, segment.branch[0]])
                likely = np.argsort(-segment.entropies, kind="stable")[: self.candidates]
                yield Rewind(segment.branch, int(rng.choice(likely)), self.branches)
