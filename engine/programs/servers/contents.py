"""The results of tools on servers as texts for a model."""

from __future__ import annotations

import json
from typing import Any

MOST = 100_000
"""Characters of a text that a model is shown; no context takes more, and longer ones cost seconds to tokenise."""


def cut(text: str) -> str:
    """Return a text, or its beginning and the number of characters that are left out."""
    return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} characters left out)"


def text_of(result: Any) -> str:
    """Return the text of a tool's result: that of its contents, one a line, after ``error: `` if it is an error.

    Contents without a text are named by their kind.
    """
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return cut(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
    text = "\n".join(_part(part) for part in result["content"])
    text = cut(text)
    return f"error: {text}" if result.get("isError") or result.get("is_error") else text


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    resource = part.get("resource")
    text = part.get("text", resource.get("text") if isinstance(resource, dict) else None)
    if isinstance(text, str):
        return text
    kind = part.get("mimeType") or part.get("mime_type") or part.get("uri") or part.get("type", "content")
    return f"[{kind}, which is not shown]"
