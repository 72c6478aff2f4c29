"""Makes texts that differ between the episodes of a group, such as times and ids, the same before they become tokens.

What the model has sampled is left: the agent's own messages, and the arguments of its calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


class Alike:
    """Replaces texts of calls.

    Args:
        same: texts by the regular expressions of what they replace, in the order in which they are applied.

    Attributes:
        unmatched: the expressions that no call has matched so far.
    """

    def __init__(self, same: Mapping[str, str]) -> None:
        self._same = [(re.compile(pattern), text) for pattern, text in same.items()]
        self.unmatched = dict.fromkeys(same)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose contents are the same, but for those of the assistant."""
        return [
            dict(message) if message["role"] == "assistant" else {**message, "content": self._text(message["content"])}
            for message in messages
        ]

    def tools(self, value: Any) -> Any:
        """Return descriptions of tools whose texts named ``description`` are the same, at any depth."""
        if isinstance(value, Mapping):
            return {
                name: self._text(inner) if name == "description" and isinstance(inner, str) else self.tools(inner)
                for name, inner in value.items()
            }
        return [self.tools(inner) for inner in value] if isinstance(value, list) else value

    def _text(self, text: str) -> str:
        for pattern, replacement in self._same:
            text, count = pattern.subn(replacement, text)
            if count:
                self.unmatched.pop(pattern.pattern, None)
        return text
