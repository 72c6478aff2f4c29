"""Independent responses that share nothing but the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .program import Action, GroupState, RolloutProgram, SegmentReport


class Flat(RolloutProgram):
    """Independent responses: ``n`` of them, each one segment, sharing only the prompt (plain sampling)."""

    independent = True

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        return ()
