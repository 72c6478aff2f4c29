"""What a checkpoint keeps of an open group: its state, what it has, and what can be kept of an unfinished request."""

from __future__ import annotations

from typing import Any

from ..programs import RolloutProgram
from ..rollout import NativeEngine, RolloutEngine
from ..rollout.branch import Request
from ..rollout.saving import request_state
from .archive import Archive, NotKeptError
from .buffer import Group

RESTARTED = {
    "call": "a call was under way, which their program does not repeat",
    "state": "their program or environment gives no state that a checkpoint can hold",
    "engine": "vLLM's engine gives no state",
}
"""Why a checkpoint keeps only the prompt of an unfinished group; in a run, `lost`: the engine knows it no more."""
KEPT = ("ticket", "prompt", "started", "overtaken", "attempt", "parts")
"""Of a group."""


def group_state(
    group: Group, request: Request | None, engine: RolloutEngine, made: RolloutProgram, archive: Archive
) -> Any:
    """``group`` in ``archive``.

    Args:
        request: aborted; None where it is not sampled.
        made: the program as it was before any request had its copy.

    Raises:
        NotKeptError: its prompt, or what it has, cannot be kept.
    """
    unfinished, lost = None, None
    if request is not None and request.started:
        unfinished, lost = _request_state(request, engine, made)
    values = {name: getattr(group, name) for name in KEPT}
    return archive.pack({**values, "state": group.state.value, "request": unfinished, "lost": lost})


def _request_state(
    request: Request, engine: RolloutEngine, made: RolloutProgram
) -> tuple[dict[str, Any] | None, str | None]:
    """What is kept of a request, or None and why it has to be begun anew."""
    if not isinstance(engine, NativeEngine):
        return None, "engine"
    if request.calls and type(request.program).repeated is RolloutProgram.repeated:
        return None, "call"
    try:
        found = request_state(request, made)
        Archive().pack(found["program"])
    except NotKeptError:
        return None, "state"
    return found, None
