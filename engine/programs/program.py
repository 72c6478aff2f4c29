"""The interface of rollout programs: reports of ended segments, actions in answer, and the base class.

The engine samples; a program steers. Every prompt gets a copy of the program, so ``self`` may hold that prompt's state.
The engine cuts responses into segments, of ``segment_tokens`` tokens or up to a stop text or token of the program.
When a segment ends, because it is full or because the response ends, the engine calls `decide` in the same step and
carries out the actions before the next one. A branch whose segment is full rests until an action continues it, so a
program may wait for its siblings. A program that forks whenever the model's entropy was high::

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

Decisions must follow from the arguments and ``group.seed`` alone, not from the order in which branches report; then a
group's responses do not depend on the other requests in its batch.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus, Origin

Array = npt.NDArray[Any]
WHOLE = sys.maxsize
BranchId = tuple[int, ...]
"""The path from the prompt to a branch: the child's index at each fork. Ids sort depth-first."""


@dataclass(frozen=True)
class GroupState:
    """Counts of the branches of one prompt, including the effect of the segments being reported."""

    width: int
    """Responses wanted: ``SamplingParams.n``."""
    seed: int
    sampling: int
    """Branches inside a segment."""
    resting: int
    """Branches with a full segment that wait for an action, including those being reported."""
    finished: int

    @property
    def leaves(self) -> int:
        return self.sampling + self.resting + self.finished


@dataclass(frozen=True)
class SegmentReport:
    """A segment that ended. Log-probs and entropies are NaN for tokens whose logits were not finite."""

    branch: BranchId
    status: LeafStatus | None
    """The way in which the response ended; None if it has not ended and the branch rests."""
    stop: str | None
    """The text that ended the segment or the response; None if no text did."""
    depth: int
    """Number of segments on the path, including this one."""
    boundaries: tuple[int, ...]
    """Response lengths at which the earlier segments of the path ended; the first is 0, the end of the prompt."""
    length: int
    """Number of response tokens on the path, including appended ones."""
    response_ids: Array  # [length] int32, the whole response
    token_ids: Array  # [tokens] int32, sampled in this segment
    logprobs: Array  # [tokens] float32, under the distribution they were sampled from
    versions: Array  # [tokens] int32, of the policy that sampled them
    temperature: float
    """Temperature that they were sampled at."""
    entropies: Array  # [tokens] float32, of softmax(logits / temperature)
    top_ids: Array  # [tokens, top_logprobs] int32, the likeliest tokens at each position, likeliest first
    top_logprobs: Array  # [tokens, top_logprobs] float32, under softmax(logits / temperature)

    @property
    def mean_logprob(self) -> float:
        """Mean log-prob of this segment's tokens: 0 without tokens, NaN if the branch failed."""
        return self._mean(self.logprobs)

    @property
    def entropy(self) -> float:
        """Mean entropy at this segment's tokens, in nats: 0 without tokens, NaN if the branch failed."""
        return self._mean(self.entropies)

    def _mean(self, values: Array) -> float:
        if self.status is LeafStatus.FAILED:
            return float("nan")
        return float(values.mean(dtype=np.float64)) if len(values) else 0.0


@dataclass(frozen=True)
class Given:
    """Tokens inserted into a response: a tool's observation, a hint, or a chosen alternative token.

    With ``logprobs`` (one for each token, under the sampling distribution) they count as sampled and are trained on;
    without, they are not trained on. ``versions`` and ``temperature`` are those that they were sampled with; by default
    the present policy's and the branch's.
    """

    token_ids: Sequence[int]
    origin: Origin = Origin.INJECTED
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Fork:
    """Continue a resting branch as ``n`` branches, after the tokens in ``append``; ``n=1`` continues the branch itself.

    With ``n=0`` nothing more is sampled: the appended tokens end the response. ``temperature`` and ``train`` hold for
    the tokens from here on and for branches that continue them; None leaves them as they are. A response of a branch
    with ``train=False`` is judged and counts in credit, but not in an update. ``role``, one of the program's ``roles``,
    holds like ``temperature``; the policy that plays it samples these tokens.
    """

    branch: BranchId
    n: int = 1
    append: Given | None = None
    segment_tokens: int | None = None
    """Length of the next segment in tokens; None for the program's, `WHOLE` for no limit."""
    temperature: float | None = None
    train: bool | None = None
    role: str | None = None


@dataclass(frozen=True)
class Finish:
    """Make a resting branch a leaf; ``train`` is that of a `Fork`."""

    branch: BranchId
    status: LeafStatus = LeafStatus.STOP
    train: bool | None = None


@dataclass(frozen=True)
class Rewind:
    """Sample ``n`` branches that share the first ``length`` response tokens of a leaf or a resting branch.

    The branch itself does not change; the new ones continue after the tokens in ``append``, as after a `Fork`.
    """

    branch: BranchId
    length: int
    n: int = 1
    append: Given | None = None
    segment_tokens: int | None = None
    temperature: float | None = None
    train: bool | None = None
    role: str | None = None


@dataclass(frozen=True)
class Prune:
    """Discard a branch, resting, sampling or a leaf, with the tokens that no other branch shares."""

    branch: BranchId


@dataclass(frozen=True)
class Call:
    """Run ``function(*arguments)`` in a thread for a resting branch, or for a leaf.

    `RolloutProgram.returned` gets the result. Other branches, of this prompt or another, are sampled meanwhile. If the
    function raises or exceeds the program's ``call_timeout_s``, a resting branch ends as FAILED, and the program is not
    called; a leaf becomes FAILED, and the result is None.
    """

    branch: BranchId
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Reward:
    """Set the reward of a leaf or of a resting branch's response; `reward.verifier` = "program" uses it.

    With ``at`` it is the reward of the turn that ends after the first ``at`` tokens of the response. It is added to the
    column `token_reward` at the last of these tokens, whatever the verifier, for the credit of turns.
    """

    branch: BranchId
    value: float
    at: int | None = None


Action = Fork | Finish | Rewind | Prune | Call | Reward


class RolloutProgram(ABC):
    """Base of all programs; subclasses override `decide` and, as needed, the other methods.

    Methods return actions, which the engine carries out one by one. If a method is a generator, it is sent the ids of
    the branches that its `Fork` or `Rewind` made: ``children = yield Rewind(...)``; no ids if the response had no room
    for the tokens to append.
    """

    segment_tokens: int | None = None
    """Length of a segment in tokens; None for one segment a response."""
    segment_stop: Sequence[str] = ()
    """Texts that end a segment, but not the response."""
    segment_stop_token_ids: Sequence[int] = ()
    """Tokens that end a segment, but not the response, even if they are end-of-sequence tokens."""
    roles: Sequence[str] = ()
    """Names of the roles in which tokens are sampled; the branches from the prompt begin in the first. A policy of
    ``[models.NAME]`` plays the role NAME, and the run's ``[model]`` all others. Empty: there is one role."""
    top_logprobs: int = 0
    """Number of likeliest tokens to report at each sampled token."""
    rewinds: bool = False
    """True if the program may rewind leaves; the engine then keeps their keys while there is room."""
    independent: bool = False
    """True if the end of a branch, and what follows it, changes no other branch. The native engine then does not put
    the others back to that step (`rollout.window`)."""
    needs_entropies: bool = False
    """True if the program reads the entropies of reports, which not every backend computes."""
    gives_older: bool = False
    """True if responses may hold tokens that an older policy sampled, so that ratios need the log-probs of sampling."""
    shared: Any = None
    """An object that the groups' copies of the program share. If it has ``state_dict`` and ``load_state_dict``,
    checkpoints of a run hold it."""
    answers_held_out: bool = False
    """True if the program also answers held-out problems, with one branch each; otherwise plain sampling does."""
    counts: Mapping[str, int] = {}
    """Numbers of a group's events, such as responses that were cut; a run adds them up in the metrics
    ``rollout/NAME``."""
    note: str = ""
    """A sentence to print before a run; empty for none."""
    takes_any_order: bool = False
    """True if results of calls may arrive in any order, so that none waits for another one's."""
    call_timeout_s: float = 60.0
    """Seconds after which a `Call` fails."""
    tried: bool = False
    """True while a run only tries whether `start` can begin a group, and samples nothing."""
    verify: Callable[[str, Any], float | None] | None = None
    """The run's verifier, a function of a response's text and the context (`with_verifier`); None outside of a run."""
    tools: Sequence[str | Mapping[str, Any]] = ()
    """Tools that the program offers the model by itself, after those of `data.tools`."""
    drawn: int = 0
    """Random numbers that responses before this one have used of its seed: the tokens of an episode before a call."""
    context: Any = None
    """The prompt's entry of ``generate(..., contexts=...)``."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The engine's tokenizer, set by the engine."""
    end_token_ids: Collection[int] = ()
    """The model's end-of-sequence tokens, set by the engine."""

    def count(self, **numbers: int) -> None:
        """Add ``numbers`` to those of the same names in `counts`."""
        self.counts = {**self.counts, **{name: self.counts.get(name, 0) + more for name, more in numbers.items()}}

    def with_verifier(self, verify: Callable[[str, Any], float | None]) -> Self:
        """Return a copy that judges responses with ``verify``, a function of a response's text and the context."""
        program = copy.copy(self)
        program.verify = verify
        return program

    def check(self, context: Any) -> None:
        """Check a prompt before the run, or when it is drawn.

        Raises:
            UserError: the program can do nothing with it.
        """
        return

    def start(self, group: GroupState) -> int:
        """Set up the group's state and return the number of branches to sample from the prompt."""
        return group.width

    @abstractmethod
    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        """Return actions for the segments that ended in this step, given in depth-first order."""

    def ended(self, group: GroupState) -> Iterable[Action]:
        """Return actions when every branch has ended; without any that begins a branch the group is complete."""
        return ()

    def returned(self, group: GroupState, branch: BranchId, result: Any) -> Iterable[Action]:
        """Return actions for the result of a `Call`; results arrive in the order of the calls, or `takes_any_order`.

        Raises:
            NotImplementedError: the program uses `Call` but does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} answers with Call but does not define `returned`.")

    def repeated(self, group: GroupState, branches: Sequence[BranchId]) -> Iterable[Action] | None:
        """Return actions that repeat the calls of ``branches``, which were running when a checkpoint was saved.

        None if the program cannot repeat them; the group then begins again from its prompt.
        """
        return None

    def close(self) -> None:
        """End what the program has started; called when the run ends."""
        return

    def state_dict(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return the state of an unfinished group for a checkpoint; ``attributes``: those set since it began."""
        return attributes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; ``context`` is set before, and `start` is not called."""
        for name, value in state.items():
            setattr(self, name, value)
