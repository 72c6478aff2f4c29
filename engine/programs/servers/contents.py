"""The results of tools on servers as texts for a model."""

from __future__ import annotations

import json
from typing import Any

MOST = 100_000
"""Characters of a text that a model is shown; no context takes more, and longer ones cost seconds to tokenise."""


def cut(text: str) -> str:
    """Return a text, or its beginning and the number of characters that are left out."""
    return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} characters left out)"


def text_of(result: Any, tool: str) -> str:
    """Return the text of a tool's result: that of its contents, one a line, after ``error: `` if it is an error.

    A result without contents is its structured content as JSON. A content without a text, such as a picture, is an
    error that names it.

    Args:
        tool: its name.
    """
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return cut(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
    parts = [_part(part, tool) for part in result["content"]]
    structured = result.get("structuredContent", result.get("structured_content"))
    if not parts and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False)]
    text = cut("\n".join(parts))
    return f"error: {text}" if result.get("isError") or result.get("is_error") else text


def _part(part: Any, tool: str) -> str:
    if not isinstance(part, dict):
        return str(part)
    inner = part["resource"] if isinstance(part.get("resource"), dict) else {}
    text = part.get("text", inner.get("text"))
    if isinstance(text, str):
        return text
    if part.get("type") == "resource_link":
        named = [str(part[key]) for key in ("uri", "title", "description") if part.get(key)]
        return f"[resource {', '.join(named)}]"
    kinds = [of.get(key) for key in ("mimeType", "mime_type", "uri", "type") for of in (part, inner)]
    kind = next((kind for kind in kinds if kind), "content")
    return f"error: {tool} gave {kind}, which conversations with tools cannot hold; only its texts are shown"
