"""The groups of a run between their prompt and their update: the state of each, and the choice of the next batch.

    queued -> sampling -> judging -> ready -> training -> done
      ^          |  ^        |  |
      |          |  +--------+  |      a group callback asks for more responses
      +----------+--------------+      restarted: another prompt, or the group's responses are gone
    any of the first four -> dropped(reason); training -> ready: of another group in the batch they are gone

A group gets a number, its *ticket*, when it is admitted. `budget` defines which groups are admitted, in which order
they are trained, and why none is trained too late. The buffer has no lock: callers hold the controller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data.tree import TokenTree
from ..prompts.group import Group, State
from ..prompts.prompts import Prompt
from .budget import Budget

AFTER: dict[State, set[State]] = {
    State.QUEUED: {State.SAMPLING, State.DROPPED},
    State.SAMPLING: {State.JUDGING, State.QUEUED, State.DROPPED},
    State.JUDGING: {State.READY, State.SAMPLING, State.QUEUED, State.DROPPED},
    State.READY: {State.TRAINING, State.QUEUED, State.DROPPED},
    State.TRAINING: {State.DONE, State.READY},
    State.DONE: set(),
    State.DROPPED: set(),
}
"""States that may follow each state."""


class LedgerError(AssertionError):
    """Sampled tokens are missing or counted twice, by a defect of this package and not of a configuration."""


@dataclass
class TokenLedger:
    """The tokens sampled in finished responses since the start of a run: trained, dropped by reason, or still open."""

    sampled: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
        """Enter dropped tokens."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def leave_out(self, reason: str, count: int) -> None:
        """Enter tokens of a trained batch that no update has used."""
        self.trained -= count
        self.drop(reason, count)

    def summary(self, still_open: int) -> str | None:
        """Return the ledger in one line; None if nothing was sampled.

        Raises:
            LedgerError: the parts do not add up to the sampled tokens.
        """
        rest = self.sampled - self.trained - sum(self.dropped.values()) - still_open
        if rest or self.trained < 0:
            wrong = "missing" if rest > 0 else "counted twice"
            raise LedgerError(
                f"{abs(rest)} of {self.sampled} sampled tokens are {wrong}; this is a mistake in rolltree, "
                "please report it."
            )
        if not self.sampled:
            return None
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.dropped.items()))
        return (
            f"Sampled tokens: {self.sampled:,} = {self.trained:,} trained + {sum(self.dropped.values()):,} dropped"
            f"{f' ({reasons})' if reasons else ''} + {still_open:,} open."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, as JSON values."""
        return {"sampled": self.sampled, "trained": self.trained, "dropped": dict(self.dropped)}


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
        self._in: dict[State, dict[int, Group]] = {state: {} for state in State}  # open groups by state and ticket
        self._stuck = -1  # newest ticket at which no batch was complete; only changes up to it may complete one
        self.steps = 0
        self.admitted = 0
        self.dropped: Counter[str] = Counter()
        """Number of groups dropped so far, by reason."""
        self.fallen: list[Group] = []
        """Judged groups dropped since the last step."""
        self.ledger = TokenLedger()

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        if self.budget.staleness == 0:
            return self.budget.lacking(len(self.open))
        return self.budget.capacity - len(self.open)

    @property
    def settled(self) -> bool:
        """True if every open group is ready."""
        return len(self._in[State.READY]) == len(self.open)

    def admit(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Admit a group for each prompt.

        Raises:
            ValueError: there are more prompts than `room`.
        """
        if len(prompts) > self.room:
            raise ValueError(f"The buffer has no room for {len(prompts)} groups: {len(self.open)} are open.")
        groups = [Group(self.admitted + i, prompt, self.steps) for i, prompt in enumerate(prompts)]
        self.admitted += len(groups)
        for group in groups:
            self.put(group, State.QUEUED)
        return groups

    def put(self, group: Group, state: State) -> None:
        """Add a group, such as one from a checkpoint, in a state."""
        group.state = state
        self.open[group.ticket] = self._in[state][group.ticket] = group
        self._stuck = -1

    def clear(self) -> None:
        """Forget all open groups, and those that were dropped since the last step."""
        self.open.clear()
        for groups in self._in.values():
            groups.clear()
        self.fallen.clear()
        self._stuck = -1

    def to(self, group: Group, state: State) -> None:
        """Put an open group into another state; `drop` and `end_step` remove it.

        Raises:
            ValueError: ``state`` may not follow the group's state, or the group is not open.
        """
        if self.open.get(group.ticket) is not group or state not in AFTER[group.state]:
            raise ValueError(f"Group {group.ticket} is {group.state} and cannot become {state}.")
        del self._in[group.state][group.ticket]
        group.state = state
        if state in (State.DONE, State.DROPPED):
            del self.open[group.ticket]
        else:
            self._in[state][group.ticket] = group
        if group.ticket <= self._stuck:
            self._stuck = -1

    def drop(self, group: Group, reason: str) -> None:
        """Drop an open group."""
        self.to(group, State.DROPPED)
        group.reason = reason
        self.ledger.drop(reason, group.sampled)
        self.dropped[reason] += 1
        if group.parts and all("reward" in part.tree.rewards for part in group.parts):
            self.fallen.append(group)

    def sampled(self, group: Group, tree: TokenTree) -> None:
        """Enter the sampled tokens of a finished tree of an open group in the ledger."""
        count = tree.sampled_tokens
        group.sampled += count
        self.ledger.sampled += count

    def discard(self, group: Group, reason: str) -> None:
        """Discard the responses of an open group, which another request replaces."""
        self.ledger.drop(reason, group.sampled)
        group.sampled = 0
        group.parts.clear()

    def keep(self, group: Group, leaves: Sequence[int], reason: str) -> None:
        """Leave responses out of a judged group, all but ``leaves``, and enter their tokens as dropped.

        Raises:
            ValueError: as `Group.keep`.
        """
        before = group.tree.sampled_tokens
        group.keep(leaves)
        left = before - group.tree.sampled_tokens
        group.sampled -= left
        self.ledger.drop(reason, left)

    def summary(self) -> str | None:
        """Return one line about the fate of every sampled token; None if none was sampled.

        Raises:
            LedgerError: tokens are missing or counted twice.
        """
        return self.ledger.summary(sum(group.sampled for group in self.open.values()))

    def among(self, *states: State) -> list[Group]:
        """Return the open groups in one of ``states``, the oldest first."""
        return sorted((group for state in states for group in self._in[state].values()), key=lambda group: group.ticket)

    def batch(self) -> list[Group] | None:
        """Return the next batch, oldest first, and put its groups into training; None while it is not complete.

        Raises:
            StalenessError: a group in it is older than the bound allows.
        """
        if self.budget.staleness == 0 and not self.settled:
            return None
        if len(self._in[State.READY]) < self.budget.batch or self._stuck >= 0:
            return None
        taken: list[Group] = []
        passed: list[tuple[Group, int]] = []  # groups passed over, and the number of older ones in the batch
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
            self._stuck = group.ticket
            return None
        for group, older in passed:
            group.overtaken += len(taken) - older
        for group in taken:
            self.budget.check(group.ticket, group.started, self.steps)
            self.to(group, State.TRAINING)
        return taken

    def give_back(self, batch: Sequence[Group]) -> None:
        """Make the groups of a batch ready again, which is not trained."""
        for group in batch:
            self.to(group, State.READY)

    def begin_anew(self, group: Group) -> None:
        """Queue an open group again without its responses, which are gone."""
        self.discard(group, "lost")
        self.to(group, State.QUEUED)
        group.attempt, group.other, group.offered, group.place = 0, None, False, None

    def end_step(self, batch: Sequence[Group]) -> None:
        """End the step that trained ``batch``; from now on the new weights sample."""
        for group in batch:
            self.to(group, State.DONE)
            self.ledger.trained += group.sampled
        self.steps += 1
        if self.budget.staleness == 0:
            for group in list(self.open.values()):
                self.drop(group, "surplus")

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, as JSON values."""
        tokens = self.ledger.state_dict()
        return {"steps": self.steps, "admitted": self.admitted, "dropped": dict(self.dropped), "tokens": tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.steps, self.admitted = state["steps"], state["admitted"]
        self.dropped = Counter(state["dropped"])
        self.ledger = TokenLedger(**state["tokens"])
