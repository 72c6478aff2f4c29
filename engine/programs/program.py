"""What a rollout program is: who forks, rewinds and finishes, and when.

The engine samples; a program steers. Every prompt gets a copy of the program, so ``self`` may hold that prompt's state.
The engine cuts responses into segments of ``segment_tokens`` tokens; whenever one ends, because it is full or because
the response is, it tells the program (`decide`) in the same step, and acts on the answer before the next one. A branch
whose segment is full rests until it is answered, so a program may wait for its siblings. A program that tries two ways
on whenever the model was unsure::

    class ForkWhenUnsure(RolloutProgram):
        segment_tokens = 32

        def start(self, group):
            return 1

        def decide(self, group, finished):
            room = group.width - group.leaves
            for segment in finished:
                if segment.status is None:
                    ways = 2 if segment.entropy > 1.0 and room > 0 else 1
                    room -= ways - 1
                    yield Fork(segment.branch, ways)

Decisions must follow from the arguments (and ``group.seed``) alone, and not from which of several branches reported
first; then a group's responses do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ..tree import LeafStatus

BranchId = tuple[int, ...]
"""The way from the prompt to a branch: its index among the children at each fork. Sorts depth-first."""


@dataclass(frozen=True)
class GroupState:
    """The branches of one prompt, after the segments being reported."""

    width: int
    """Responses wanted: ``SamplingParams.n``."""
    seed: int
    sampling: int
    """Branches inside a segment."""
    resting: int
    """Branches whose segment is full and that wait for an action, those being reported included."""
    finished: int

    @property
    def leaves(self) -> int:
        return self.sampling + self.resting + self.finished


@dataclass(frozen=True)
class SegmentReport:
    """A segment that ended."""

    branch: BranchId
    status: LeafStatus | None
    """How the response ended; None: it has not, and the branch rests."""
    depth: int
    """Segments on the path, this one included."""
    boundaries: tuple[int, ...]
    """Response lengths at which the earlier segments of the path ended; the first is 0, the prompt."""
    length: int
    """Response tokens on the path."""
    token_ids: npt.NDArray[Any]  # [tokens] int32, of this segment
    mean_logprob: float
    """Of this segment's tokens, under the distribution they were sampled from; NaN where the model's logits were not
    finite and the response FAILED."""
    entropy: float
    """Mean over this segment's tokens, of softmax(logits / temperature)."""


@dataclass(frozen=True)
class Fork:
    """Let a resting branch go on as ``n`` branches; ``n=1`` continues it."""

    branch: BranchId
    n: int = 1


@dataclass(frozen=True)
class Finish:
    """Make a resting branch a leaf."""

    branch: BranchId
    status: LeafStatus = LeafStatus.STOP


@dataclass(frozen=True)
class Rewind:
    """Sample ``n`` branches that share the first ``length`` response tokens of a finished one, which stays a leaf."""

    branch: BranchId
    length: int
    n: int = 1


Action = Fork | Finish | Rewind


class RolloutProgram:
    """Base of all programs; override `decide`, and what else differs."""

    segment_tokens: int | None = None
    """Length of a segment; None: a response is one segment."""
    rewinds: bool = False
    """Whether `Rewind` is used; the keys of finished branches are kept then, while there is room."""

    def start(self, group: GroupState) -> int:
        """Branches sampled from the prompt."""
        return group.width

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        """Called with the segments that ended in this step, in depth-first order."""
        raise NotImplementedError
