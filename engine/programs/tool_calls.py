"""Calls of tools that a model writes of its own accord, as the chat templates of most models have it.

    text before <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> text after

What stands between the marks and is no call of a tool that was offered stays text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"


class Written(NamedTuple):
    content: str
    """All that is no call; without the white space at its end where there are calls."""
    calls: list[tuple[str, str]]
    """Names and arguments, a JSON object each."""


def written(text: str, tools: Collection[str], most: int | None = None) -> Written:
    """What an answer says and what it calls; what comes after ``most`` calls stays text."""
    content, at = "", 0
    calls: list[tuple[str, str]] = []
    while (begin := text.find(BEGIN, at)) >= 0 and (end := text.find(END, begin)) >= 0 and len(calls) != most:
        call = _call(text[begin + len(BEGIN) : end], tools)
        if call is not None:
            calls.append(call)
        end += len(END)
        content += text[at:begin] if call is not None else text[at:end]
        at = end
    content += text[at:]
    return Written(content.rstrip() if calls else content, calls)


def before_calls(text: str) -> str:
    """The beginning of an answer that is content, whatever follows: up to a mark, or to what may become one."""
    begin = text.find(BEGIN)
    if begin < 0:
        begin = next((i for i in range(max(len(text) - len(BEGIN) + 1, 0), len(text)) if BEGIN.startswith(text[i:])),
                     len(text))  # fmt: skip
    return text[:begin].rstrip()


def _call(text: str, tools: Collection[str]) -> tuple[str, str] | None:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("name") not in list(tools):
        return None
    arguments = found.get("arguments", {})
    return (found["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
