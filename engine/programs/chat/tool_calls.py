"""Splits a turn of the model into its text and its calls of tools.

What opens as a call and is none stays part of what the turn says. A model's thinking calls nothing: calls are looked
for after its end, where the turn has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from .call_reading import Found, Malformed, Schemas, ToolCall
from .tool_formats import FORMATS, ToolFormat

HERMES = FORMATS["hermes"]
THINKING_END = "</think>"


class Turn(NamedTuple):
    content: str
    """All that is no call; without the white space at its end where there are calls."""
    calls: list[ToolCall]
    """Calls of offered tools."""
    malformed: list[tuple[int, Malformed]]
    """Texts that open as a call and are none, each with its place among all calls."""


def read_turn(text: str, tools: Collection[str] | Schemas, form: ToolFormat = HERMES, most: int | None = None) -> Turn:
    """Return what a turn says and calls; what comes after ``most`` calls stays text."""
    content, at, said = "", 0, Turn("", [], [])
    for number, found in enumerate(_found(text, tools, form)):
        if isinstance(found.call, Malformed):
            said.malformed.append((number, found.call))
        elif most is None or len(said.calls) < most:
            said.calls.append(found.call)
            content, at = content + text[at : max(found.begin, at)], found.end
    content += text[at:]
    return said._replace(content=content.rstrip() if said.calls else content)


def before_calls(text: str, form: ToolFormat = HERMES) -> str:
    """Return the beginning of a turn that is content, whatever follows: up to a mark, or to what may become one."""
    ends = [len(text)]
    for mark in form.marks:
        begin = text.find(mark)
        whole = max(len(text) - len(mark) + 1, 0)
        ends.append(
            begin if begin >= 0 else next((i for i in range(whole, len(text)) if mark.startswith(text[i:])), len(text))
        )
    return text[: min(ends)].rstrip()


def form_of(text: str, tools: Collection[str] | Schemas) -> ToolFormat:
    """Return the first form in which ``text`` calls one of ``tools``; Hermes' where it calls none."""
    forms = (form for form in FORMATS.values() if read_turn(text, tools, form).calls)
    return next(forms, HERMES)


def _found(text: str, tools: Collection[str] | Schemas, form: ToolFormat) -> Iterator[Found]:
    thought = text.find(THINKING_END)
    begin = 0 if thought < 0 else thought + len(THINKING_END)
    schemas = tools if isinstance(tools, dict) else {name: {} for name in tools}
    for found in form.find(text[begin:], schemas):
        yield Found(found.begin + begin, found.end + begin, found.call)
