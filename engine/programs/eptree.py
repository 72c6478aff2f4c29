"""EPTree of TreeRL (arXiv 2506.11902) and CURE: finished responses branch again at uncertain tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..data.segment import LeafStatus
from .program import Action, BranchId, GroupState, Rewind, RolloutProgram, SegmentReport


class EPTree(RolloutProgram):
    """EPTree of TreeRL (arXiv 2506.11902): finished responses branch again at their least likely tokens.

    The group begins with ``chains`` responses. In each of ``rounds`` rounds, the ``forks`` tokens with the highest
    ``-log p`` in the tree of each chain are sampled again, ``continuations`` times each. ``n`` must be the number of
    leaves, ``chains * (1 + forks * rounds * continuations)``.

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
            raise ValueError(f"eptree with these options makes {leaves} leaves; set rollout.n to that.")
        self._round = 0
        self._tokens: dict[int, list[tuple[float, BranchId, int]]] = {}  # chain -> log-prob, leaf, response length
        return self.chains

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            if segment.status is not LeafStatus.FAILED:
                first = segment.length - len(segment.token_ids)
                of_chain = self._tokens.setdefault(segment.branch[0], [])
                of_chain += [(float(lp), segment.branch, first + i) for i, lp in enumerate(segment.logprobs)]
        if group.sampling or self._round == self.rounds:
            return
        self._round += 1
        for chain in sorted(self._tokens):
            tokens = sorted(self._tokens[chain])
            self._tokens[chain] = tokens[self.forks :]  # no token is taken twice
            for _, branch, length in tokens[: self.forks]:
                yield Rewind(branch, length, self.continuations)


class CURE(RolloutProgram):
    """The first stage of CURE (arXiv 2508.11016): finished responses are sampled again from a high-entropy token.

    One of the ``candidates`` tokens with the highest entropy is drawn, and ``branches`` responses continue from the
    tokens before it. ``n`` counts originals and branches, so it must be a multiple of ``1 + branches``.

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
