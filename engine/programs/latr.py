"""LATR (arXiv 2510.24302): branch at tokens with a likely alternative, look ahead, and prune similar branches."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from ..data.segment import LeafStatus
from .program import Action, BranchId, Fork, Given, GroupState, Prune, Rewind, RolloutProgram, SegmentReport

Array = npt.NDArray[Any]


class LATR(RolloutProgram):
    """LATR (arXiv 2510.24302): one response branches at likely alternative tokens until there are ``n`` leaves.

    A token v among the ``top`` likeliest, except the likeliest itself, begins a branch if ``p(v) > tau_abs`` and
    ``p(first) - p(v) < tau_rel``. After ``lookahead`` tokens the branch is pruned if it is similar to the response that
    it left: edit distance below ``tau_edit * lookahead``, a common suffix longer than ``tau_suffix * lookahead``, or
    ROUGE-L above ``tau_rouge``. Probabilities are those of softmax(logits / temperature). After all branches have
    ended, missing leaves are sampled from the prompt.

    Raises:
        ValueError: an argument is out of range.
    """

    rewinds = True

    def __init__(
        self,
        top: int = 2,
        tau_abs: float = 0.15,
        tau_rel: float = 0.25,
        lookahead: int = 30,
        tau_edit: float = 0.4,
        tau_suffix: float = 0.2,
        tau_rouge: float = 0.5,
    ) -> None:
        if top < 2 or lookahead < 1:
            raise ValueError("latr needs top >= 2 and lookahead >= 1.")
        self.top_logprobs, self.segment_tokens = top, lookahead
        self.lookahead = lookahead
        self.tau_abs, self.tau_rel = tau_abs, tau_rel
        self.tau_edit, self.tau_suffix, self.tau_rouge = tau_edit, tau_suffix, tau_rouge

    def start(self, group: GroupState) -> int:
        self._known: dict[BranchId, tuple[Array, bool]] = {}  # response so far, True if it has ended
        self._origin: dict[BranchId, tuple[BranchId, int]] = {}  # branch that it left, length there
        self._judging: list[BranchId] = []  # waiting for the tokens of the branch that they left
        self._round: list[SegmentReport] = []
        return 1

    def decide(
        self, group: GroupState, finished: Sequence[SegmentReport]
    ) -> Generator[Action, Sequence[BranchId], None]:
        """Continue all branches of a prompt together, so that the last places do not depend on their speed."""
        self._round += finished
        if group.sampling:
            return
        reports, self._round = sorted(self._round, key=lambda segment: segment.branch), []
        room = group.width - group.leaves
        for segment in reports:
            self._known[segment.branch] = segment.response_ids, segment.status is not None
            if segment.branch in self._origin and segment.depth == self._depth(segment):
                self._judging.append(segment.branch)
        for segment in reports:
            if segment.status is not LeafStatus.FAILED:
                for length, token, logprob in self._alternatives(segment):
                    if room == 0:
                        break
                    room -= 1
                    children = yield Rewind(segment.branch, length, 1, Given([token], logprobs=[logprob]))
                    self._origin |= dict.fromkeys(children, (segment.branch, length))
            if segment.status is None and segment.branch not in self._judging:
                yield Fork(segment.branch)
        for branch in list(self._judging):
            alike = self._alike(branch)
            if alike is None:
                continue
            self._judging.remove(branch)
            response, ended = self._known[branch]
            if alike:
                self._known[branch] = response, True
                yield Prune(branch)
            elif not ended:
                yield Fork(branch)

    def ended(self, group: GroupState) -> Iterable[Action]:
        if group.leaves < group.width:
            yield Rewind((0,), 0, group.width - group.leaves)

    def _depth(self, segment: SegmentReport) -> int:
        """Return the depth at which a branch's first segment ends."""
        _, length = self._origin[segment.branch]
        return sum(b <= length for b in segment.boundaries)

    def _alternatives(self, segment: SegmentReport) -> Iterable[tuple[int, int, float]]:
        """Yield (response length, token, log-prob) of each alternative token that begins a branch."""
        first = segment.length - len(segment.token_ids)
        p = np.exp(segment.top_logprobs)
        worth = (p[:, 1:] > self.tau_abs) & (p[:, :1] - p[:, 1:] < self.tau_rel)
        worth &= segment.top_ids[:, 1:] != segment.token_ids[:, None]
        for i, rank in zip(*np.nonzero(worth), strict=True):
            yield first + int(i), int(segment.top_ids[i, rank + 1]), float(segment.top_logprobs[i, rank + 1])

    def _alike(self, branch: BranchId) -> bool | None:
        """Return True if a branch is similar to the one that it left; None while too few tokens are sampled."""
        source, length = self._origin[branch]
        tokens = self._known[branch][0][length : length + self.lookahead + 1]
        response, ended = self._known[source]
        source_tokens = response[length : length + len(tokens)]
        if len(source_tokens) < len(tokens) and not ended:
            return None
        return self._similar(tokens, source_tokens)

    def _similar(self, a: Array, b: Array) -> bool:
        r = max(len(a), 1)
        edits, common = _distances(a, b)
        same = a[::-1][: len(b)] == b[::-1][: len(a)]
        suffix = len(same) if same.all() else int(same.argmin())
        rouge = 2 * common / max(len(a) + len(b), 1)
        return edits < self.tau_edit * r or suffix > math.ceil(self.tau_suffix * r) or rouge > self.tau_rouge


@numba.njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _distances(a: Array, b: Array) -> tuple[int, int]:
    """Return the edit distance and the length of the longest common subsequence."""
    edits = np.arange(len(b) + 1)
    common = np.zeros(len(b) + 1, np.int64)
    for i in range(len(a)):
        diagonal, edits[0], above = edits[0], i + 1, common[0]
        for j in range(len(b)):
            same = a[i] == b[j]
            diagonal, edits[j + 1] = edits[j + 1], min(diagonal + (not same), edits[j] + 1, edits[j + 1] + 1)
            above, common[j + 1] = common[j + 1], above + 1 if same else max(common[j], common[j + 1])
    return edits[-1], common[-1]
