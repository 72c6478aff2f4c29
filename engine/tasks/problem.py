"""The common form of problems from all sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A problem to solve."""

    id: str
    task: str
    text: str
    """The problem itself; for a conversation all its messages."""
    entry: dict[str, Any]
    """Data for the verifier, passed with the response; has at least an ``answer``."""
    messages: tuple[dict[str, str], ...] = ()
    """The messages of a conversation, each with ``role`` and ``content``; empty for a plain text."""
