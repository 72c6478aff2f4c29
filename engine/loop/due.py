"""The step of the sampler at which the group callback's answer to a judged group acts, at staleness 0.

A step of the sampler has a row for every unfinished response, so the last bits of log-probs may depend on when further
responses begin. A run of one seed is the same however long its verifiers take if an answer acts after a fixed number
of steps and never when the verdict has come: the sampler waits for a verdict that is not there by then, and goes on
with the other groups until then.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..prompts.group import Group, State
from ..rollout import SamplingParams
from .buffer import Buffer

SHARE = 16
"""An answer acts ``max_new_tokens / SHARE`` steps after its group has finished: verifiers have that long, and the
sampler waits for slow ones at most so often while the longest response is decoded."""


class Due:
    """Chooses the groups whose answers act now.

    Args:
        buffer: holds the groups.
        counted: see `SamplingParts`. Otherwise, as with engines in other processes, the answers to all groups act
            together, when none is being sampled.
    """

    def __init__(self, buffer: Buffer, *, counted: bool) -> None:
        self._buffer, self._counted = buffer, counted
        self._steps = 0
        self._finished: dict[Group, int] = {}  # by group: the step after which its newest responses were complete

    def step(self) -> None:
        """Count a step of the sampler."""
        self._steps += 1

    def finish(self, groups: Iterable[Group]) -> None:
        """Note that the newest responses of ``groups`` are complete."""
        unanswered = {group: at for group, at in self._finished.items() if group.state is State.JUDGING}
        self._finished = unanswered | dict.fromkeys(groups, self._steps)

    def now(self, params: SamplingParams) -> list[Group]:
        """Return the groups that are due; they are sampled with ``params``."""
        unanswered = self._buffer.among(State.JUDGING)
        if not self._buffer.among(State.SAMPLING):
            return unanswered
        if not self._counted:
            return []
        latest = self._steps - max(1, params.max_new_tokens // SHARE)
        return [group for group in unanswered if self._finished[group] <= latest]
