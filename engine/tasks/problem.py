"""The common form of problems from all sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .images import Image, digest_of


@dataclass(frozen=True)
class Problem:
    """A problem to solve."""

    id: str
    task: str
    text: str
    """The problem itself; for a conversation all its messages."""
    entry: dict[str, Any]
    """Data for the verifier, passed with the response; has at least an ``answer``."""
    messages: tuple[dict[str, Any], ...] = ()
    """The messages of a conversation, each with ``role`` and ``content``; empty for a plain text."""
    images: tuple[Image, ...] = ()
    """Its pictures, in the order in which the prompt shows them."""

    @cached_property
    def identity(self) -> str:
        """The text, and a hash of the pictures if there are any; training and held-out problems never share one."""
        return self.text + digest_of(self.images)
