"""What a rollout program is: who forks, rewinds, appends and finishes, and when.

The engine samples; a program steers. Every prompt gets a copy of the program, so ``self`` may hold that prompt's state.
The engine cuts responses into segments, of ``segment_tokens`` tokens or up to a text or token that the program names;
whenever one ends, because it is full or because the response is, it tells the program (`decide`) in the same step, and
acts on the answer before the next one. A branch whose segment is full rests until it is answered, so a program may wait
for its siblings. A program that tries two ways on whenever the model was unsure::

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

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus, Origin

Array = npt.NDArray[Any]
WHOLE = sys.maxsize
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
    """A segment that ended. Log-probs and entropies are NaN where the model's logits were not finite."""

    branch: BranchId
    status: LeafStatus | None
    """How the response ended; None: it has not, and the branch rests."""
    stop: str | None
    """The text that ended the segment or the response, if one did."""
    depth: int
    """Segments on the path, this one included."""
    boundaries: tuple[int, ...]
    """Response lengths at which the earlier segments of the path ended; the first is 0, the prompt."""
    length: int
    """Response tokens on the path, appended ones included."""
    response_ids: Array  # [length] int32, all of them
    token_ids: Array  # [tokens] int32, sampled in this segment
    logprobs: Array  # [tokens] float32, under the distribution they were sampled from
    entropies: Array  # [tokens] float32, of softmax(logits / temperature)
    top_ids: Array  # [tokens, top_logprobs] int32, the likeliest tokens in each one's place, likeliest first
    top_logprobs: Array  # [tokens, top_logprobs] float32, under softmax(logits / temperature)

    @property
    def mean_logprob(self) -> float:
        """Mean over this segment's tokens."""
        return self._mean(self.logprobs)

    @property
    def entropy(self) -> float:
        """Mean over this segment's tokens."""
        return self._mean(self.entropies)

    def _mean(self, values: Array) -> float:
        if self.status is LeafStatus.FAILED:
            return float("nan")
        return float(values.mean(dtype=np.float64)) if len(values) else 0.0


@dataclass(frozen=True)
class Given:
    """Tokens put into a response: a tool's observation, a hint, or a token chosen among the likely ones.

    With ``logprobs`` (one each, under the sampling distribution) they count as sampled and are trained on; without,
    they are not.
    """

    token_ids: Sequence[int]
    origin: Origin = Origin.INJECTED
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True)
class Fork:
    """Let a resting branch go on as ``n`` branches, behind the tokens given; ``n=1`` continues it.

    With ``n=0`` nothing more is sampled: the tokens given end the response.
    """

    branch: BranchId
    n: int = 1
    append: Given | None = None
    segment_tokens: int | None = None
    """Length of the next segment, instead of the program's; `WHOLE` for no limit."""


@dataclass(frozen=True)
class Finish:
    """Make a resting branch a leaf."""

    branch: BranchId
    status: LeafStatus = LeafStatus.STOP


@dataclass(frozen=True)
class Rewind:
    """Sample ``n`` branches that share the first ``length`` response tokens of a leaf or a resting branch.

    That one stays what it is; the new ones go on behind the tokens given, if any, as after a `Fork`.
    """

    branch: BranchId
    length: int
    n: int = 1
    append: Given | None = None
    segment_tokens: int | None = None


@dataclass(frozen=True)
class Prune:
    """Give up a branch, resting, sampling or a leaf: what only it sampled is not part of the tree."""

    branch: BranchId


@dataclass(frozen=True)
class Call:
    """Run ``function(*arguments)`` in a thread for a resting branch, or for a leaf.

    `RolloutProgram.returned` gets the result. No branch, of this prompt or another, waits with it. Where the function
    raises, or runs longer than the program's ``call_timeout_s``, a resting branch ends as FAILED without a question; a
    leaf becomes FAILED and the result is None.
    """

    branch: BranchId
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reward:
    """Give the response of a resting branch, or a leaf, its reward: the verdict of `reward.verifier` = "program"."""

    branch: BranchId
    value: float


Action = Fork | Finish | Rewind | Prune | Call | Reward


class RolloutProgram(ABC):
    """Base of all programs; override `decide`, and what else differs.

    Questions are answered with actions, done one by one as they come. A generator is sent the ids of the branches that
    its `Fork` or `Rewind` has made: ``children = yield Rewind(...)``; none where there was no room for what to append.
    """

    segment_tokens: int | None = None
    """Length of a segment; None: a response is one segment."""
    segment_stop: Sequence[str] = ()
    """Texts that end a segment as soon as it holds one, and not the response."""
    segment_stop_token_ids: Sequence[int] = ()
    """Tokens that end a segment and not the response, also where they would end it otherwise."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are reported for each token sampled."""
    rewinds: bool = False
    """Whether leaves are rewound; their keys are kept then, while there is room."""
    needs_entropies: bool = False
    """Whether it looks at the entropies of reports, which not every backend knows."""
    answers_held_out: bool = False
    """Whether held-out problems are answered by the program too, one branch each; otherwise by plain sampling."""
    note: str = ""
    """What the user should know before a run, in a sentence."""
    call_timeout_s: float = 60.0
    """Seconds after which a `Call` has failed."""
    verify: Callable[[str, Any], float | None] | None = None
    """The run's own verifier, of a response's text and the context (`with_verifier`); None outside of a run."""
    context: Any = None
    """What ``generate(..., contexts=...)`` gave for the prompt."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The engine's, set by it."""
    end_token_ids: Collection[int] = ()
    """The model's end-of-sequence tokens, set by the engine."""

    def with_verifier(self, verify: Callable[[str, Any], float | None]) -> Self:
        """Return a copy that judges responses with ``verify``, a function of a response's text and the context."""
        program = copy.copy(self)
        program.verify = verify
        return program

    def start(self, group: GroupState) -> int:
        """Branches sampled from the prompt."""
        return group.width

    @abstractmethod
    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        """Called with the segments that ended in this step, in depth-first order."""

    def ended(self, group: GroupState) -> Iterable[Action]:
        """Called when every branch has ended; its answer may begin more of them. Without one the group is complete."""
        return ()

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        """Called with the result of a `Call`; results come in the order of the calls."""
        raise NotImplementedError(f"{type(self).__name__} answers with Call but does not define `returned`.")

    def repeated(self, group: GroupState, branches: Sequence[BranchId]) -> Iterable[Action] | None:
        """Called where a run goes on from a checkpoint, with the branches whose calls were under way then.

        Its answer calls again. None: it cannot, and such a group is begun anew from its prompt.
        """
        return None

    def state_dict(self, own: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint keeps of an unfinished group, given the attributes that were set since it began."""
        return own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; the context is there, and `start` is not called again."""
        for name, value in state.items():
            setattr(self, name, value)
