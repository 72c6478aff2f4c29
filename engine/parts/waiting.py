"""Waiting in a call of a program: for a free session of a server, for instance.

A call that waits occupies no place among those that run at once, and its time limit stands still; otherwise calls that
wait for something would keep the calls that free it from running.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

PLACE: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("place", default=nullcontext)
"""Gives up the place of the call that runs in this thread, and takes one again at the end of the block."""


def waiting() -> AbstractContextManager[None]:
    """Return a context in which the call that runs in this thread only waits; outside of calls it does nothing."""
    return PLACE.get()()
