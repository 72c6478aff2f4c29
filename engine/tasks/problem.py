"""A problem, whatever its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    id: str
    task: str
    text: str
    """The problem itself; of a conversation all its messages."""
    entry: dict[str, Any]
    """What the verifier is given beside the response; has at least an ``answer``."""
    messages: tuple[dict[str, str], ...] = ()
    """Of a conversation: each a ``role`` and its ``content``."""
