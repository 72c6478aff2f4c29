"""An open group in a checkpoint: its state, its responses, and the sampler's state of an unfinished job."""

from __future__ import annotations

from typing import Any

from ..rollout.sampler import Kept
from .archive import Archive, NotKeptError
from .buffer import Group

RESTARTED = {
    "call": "a call was under way, which their program does not repeat",
    "state": "their program or environment gives no state that a checkpoint can hold",
}
"""Reasons for which a checkpoint keeps only a group's prompt; a run adds `lost`: the sampler lost its job."""
KEPT = ("ticket", "prompt", "started", "overtaken", "attempt", "sampled", "parts")
"""Fields of `Group` that a checkpoint stores."""


def group_state(group: Group, kept: Kept | None, archive: Archive) -> Any:
    """Pack ``group`` into ``archive``.

    Args:
        kept: the sampler's state of the unfinished job; None if the group is not being sampled.

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
    return archive.pack({**values, "state": group.state.value, "request": unfinished, "lost": lost})
