"""The groups of a run between their prompt and their update: who is in which state, and which make the next batch.

    queued -> sampling -> judging -> ready -> training -> done
      ^          |  ^        |  |
      |          |  +--------+  |      more responses are wanted (a group callback)
      +----------+--------------+      begun anew: another prompt, or a resumed run that could not keep what there was
    any of the first four -> dropped(reason)

A group is numbered by its *ticket* when it is admitted and keeps it; `budget` says who is admitted, in which order they
are trained, and why none is trained too late. The buffer holds no lock: whoever changes it holds the controller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..data.concat import join
from ..data.tree import TokenTree
from ..rewards import RewardResult
from .budget import Budget
from .sources import Prompt


class State(StrEnum):
    """Where a group is."""

    QUEUED = "queued"
    SAMPLING = "sampling"
    JUDGING = "judging"
    READY = "ready"
    TRAINING = "training"
    DONE = "done"
    DROPPED = "dropped"


AFTER: dict[State, set[State]] = {
    State.QUEUED: {State.SAMPLING, State.DROPPED},
    State.SAMPLING: {State.JUDGING, State.QUEUED, State.DROPPED},
    State.JUDGING: {State.READY, State.SAMPLING, State.QUEUED, State.DROPPED},
    State.READY: {State.TRAINING, State.DROPPED},
    State.TRAINING: {State.DONE},
    State.DONE: set(),
    State.DROPPED: set(),
}
"""The states that may follow each."""


@dataclass(eq=False)
class Responses:
    """What one request brought for a group."""

    tree: TokenTree
    texts: list[str]
    """Of its responses, in the order of the leaves."""
    unsampled: dict[int, str]
    """Leaves that could not be sampled, and why."""
    verdicts: list[RewardResult] = field(default_factory=list)
    """On the other leaves."""


@dataclass(eq=False)
class Group:
    """The responses to one prompt, on their way."""

    ticket: int
    prompt: Prompt
    started: int
    """Steps that had ended when it was admitted."""
    state: State = State.QUEUED
    reason: str = ""
    """Why it was dropped."""
    overtaken: int = 0
    """Younger groups taken before it."""
    attempt: int = 0
    """Requests made for it before the present one."""
    parts: list[Responses] = field(default_factory=list)
    """What its requests brought; the newest may not be judged yet."""

    @property
    def tree(self) -> TokenTree:
        """All its responses."""
        if len(self.parts) > 1:
            joined = Responses(join([part.tree for part in self.parts]), self.texts, {}, self.verdicts)
            begin = 0
            for part in self.parts:
                joined.unsampled |= {begin + leaf: why for leaf, why in part.unsampled.items()}
                begin += part.tree.num_leaves
            joined.tree.set("group", self.ticket)
            self.parts = [joined]
        return self.parts[0].tree

    @property
    def texts(self) -> list[str]:
        """Of all responses, in the order of the leaves."""
        return [text for part in self.parts for text in part.texts]

    @property
    def unsampled(self) -> list[str]:
        """Why responses could not be sampled, one each."""
        return [why for part in self.parts for why in part.unsampled.values()]

    @property
    def verdicts(self) -> list[RewardResult]:
        """On the responses that were sampled."""
        return [verdict for part in self.parts for verdict in part.verdicts]


class Buffer:
    """The open groups, the oldest first.

    >>> buffer = Buffer(Budget(batch=2, staleness=1, window=0.5))  # 3 open, 1 may overtake
    >>> a, b, c = buffer.admit(prompts)
    >>> buffer.room
    0
    >>> buffer.to(a, State.SAMPLING)  # and so on; b takes longer than the others
    >>> buffer.batch()  # a and c are ready: c overtakes b, as one may
    [a, c]
    >>> buffer.end_step()  # steps = 1; two may be admitted, and b is in the next batch or the run waits
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.open: dict[int, Group] = {}
        self.steps = 0
        self.admitted = 0
        self.dropped: Counter[str] = Counter()
        """Groups dropped so far, by reason."""

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        if self.budget.staleness == 0 and not self.settled:
            return 0
        return self.budget.capacity - len(self.open)

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way to being ready."""
        return all(group.state is State.READY for group in self.open.values())

    def admit(self, prompts: Sequence[Prompt]) -> list[Group]:
        """New groups; there must be `room`."""
        if len(prompts) > self.room:
            raise ValueError(f"The buffer has no room for {len(prompts)} groups: {len(self.open)} are open.")
        groups = [Group(self.admitted + i, prompt, self.steps) for i, prompt in enumerate(prompts)]
        self.admitted += len(groups)
        self.open |= {group.ticket: group for group in groups}
        return groups

    def to(self, group: Group, state: State) -> None:
        """Put an open group into another state; `drop` and `end_step` end it.

        Raises:
            ValueError: ``state`` does not follow from where it is, or the group is not open.
        """
        if self.open.get(group.ticket) is not group or state not in AFTER[group.state]:
            raise ValueError(f"Group {group.ticket} is {group.state} and cannot become {state}.")
        group.state = state

    def drop(self, group: Group, reason: str) -> None:
        """Give a group up."""
        self.to(group, State.DROPPED)
        group.reason = reason
        del self.open[group.ticket]
        self.dropped[reason] += 1

    def among(self, *states: State) -> list[Group]:
        """The open groups in one of ``states``."""
        return [group for group in self.open.values() if group.state in states]

    def batch(self) -> list[Group] | None:
        """The next batch, now training, oldest first; None while it is not complete.

        Raises:
            StalenessError: a group in it is older than the bound allows.
        """
        if self.budget.staleness == 0 and not self.settled:
            return None
        taken: list[Group] = []
        passed: list[tuple[Group, int]] = []  # and how many of the batch are older
        may = len(self.open)  # further groups that may overtake those passed over
        for group in self.open.values():
            if len(taken) == self.budget.batch or may == 0:
                break
            if group.state is not State.READY:
                passed.append((group, len(taken)))
                may = min(may, self.budget.overtaking - group.overtaken)
            else:
                taken.append(group)
                may -= bool(passed)
        if len(taken) < self.budget.batch:
            return None
        for group, older in passed:
            group.overtaken += len(taken) - older
        for group in taken:
            self.budget.check(group.ticket, group.started, self.steps)
            self.to(group, State.TRAINING)
        return taken

    def end_step(self, batch: Sequence[Group]) -> None:
        """``batch`` has been trained; what it taught is in the weights that sample from now on."""
        for group in batch:
            self.to(group, State.DONE)
            del self.open[group.ticket]
        self.steps += 1
        if self.budget.staleness == 0:
            for group in list(self.open.values()):
                self.drop(group, "surplus")

    def state_dict(self) -> dict[str, Any]:
        """Its counts; fit for JSON."""
        return {"steps": self.steps, "admitted": self.admitted, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.admitted = state["steps"], state["admitted"]
        self.dropped = Counter(state["dropped"])
