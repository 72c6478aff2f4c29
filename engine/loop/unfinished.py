"""An open group in a checkpoint: its state, its responses, and the sampler's state of an unfinished job."""

from __future__ import annotations

from typing import Any

from ..prompts.archive import Archive, NotKeptError
from ..prompts.group import Group
from ..rollout.sampler import Flight, Kept

RESTARTED = {
    "call": "a call was under way, which their program does not repeat",
    "agent": "an agent was at work, which begins its episode anew",
    "state": "their program or environment gives no state that a checkpoint can hold",
}
"""Reasons for which a checkpoint keeps only a group's prompt; a run adds `lost`: the sampler lost its job."""
KEPT = ("ticket", "prompt", "started", "overtaken", "other", "attempt", "sampled", "parts")
"""Fields of `Group` that a checkpoint stores."""


SCHEDULED = ("n", "temperature", "max_new_tokens")
"""Sampling parameters that may differ from those of later jobs."""


def group_state(group: Group, flight: Flight | None, kept: Kept | None, archive: Archive) -> Any:
    """Pack ``group`` into ``archive``.

    Args:
        flight: the unfinished job; None if the group is not being sampled.
        kept: the sampler's state of this job.

    Raises:
        NotKeptError: the prompt or the responses cannot be stored.
    """
    unfinished, lost = (None, None) if kept is None else kept
    if unfinished is not None:
        try:
            Archive().pack(unfinished["program"])
        except NotKeptError:
            unfinished, lost = None, "state"
    values = {name: getattr(group, name) for name in KEPT}
    values |= {"state": group.state.value, "request": unfinished, "lost": lost}
    params = None if flight is None else {name: getattr(flight.job.params, name) for name in SCHEDULED}
    return archive.pack(values | {"params": params})
