"""A call of a tool, and how the parts of one are read: names, arguments, JSON within text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool that was offered."""
DECODER = json.JSONDecoder()


class MalformedError(ValueError):
    """A call that cannot be read; the message may be empty."""


@dataclass(frozen=True)
class ToolCall:
    """A call of an offered tool; ``id`` is the one that the model gave it."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Malformed:
    """A text that opens as a call and is no call of an offered tool."""

    reason: str = ""


@dataclass(frozen=True)
class Found:
    """A call, or what is none, and the part of the turn that writes it."""

    begin: int
    end: int
    call: ToolCall | Malformed


def checked(found: Any, tools: Schemas, *keys: str) -> ToolCall:
    """Return the call that a JSON value ``{"name": ..., key: {...}}`` makes."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or found["name"] not in tools:
        raise MalformedError
    arguments: Any = next((found[key] for key in keys if key in found), {})
    if not isinstance(arguments, dict):
        raise MalformedError
    given = found.get("id")
    known = isinstance(given, str) and re.fullmatch(r"[\w-]{1,64}", given)
    return ToolCall(found["name"], arguments, given if known else None)


def typed(name: str, texts: Mapping[str, str], tools: Schemas) -> ToolCall:
    """Return a call whose arguments were written as bare text."""
    if name not in tools:
        raise MalformedError
    schemas = tools[name].get("properties", {})
    return ToolCall(name, {key: _value(name, key, text, schemas.get(key, {})) for key, text in texts.items()})


def _value(name: str, key: str, text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument: its text where the schema allows one or says nothing, else as JSON."""
    kinds = {kind for part in (schema, *schema.get("anyOf", ())) for kind in _as_list(part.get("type", ()))}
    spelt = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)  # as Jinja writes Python's
    if schema.get("nullable") and spelt == "null":
        return None
    if not kinds or (kinds == {"string"}):
        return text
    try:
        value = json.loads(spelt)
    except (ValueError, RecursionError):
        if "string" in kinds:
            return text
        raise MalformedError(f"argument '{key}' of {name} is no {' or '.join(sorted(kinds))}: {text!r}") from None
    return text if "string" in kinds and isinstance(value, str) else value


def _as_list(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def read(call: Callable[[], ToolCall]) -> ToolCall | Malformed:
    """Return the call that ``call`` returns, `Malformed` where it raises."""
    try:
        return call()
    except MalformedError as error:
        return Malformed(str(error))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return Malformed()


def json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at ``at``, white space before it allowed, and where it ends.

    Raises:
        ValueError: there is none.
    """
    found, end = DECODER.raw_decode(text, re.compile(r"\s*").match(text, at).end())  # type: ignore[union-attr]
    return found, end


def enclosed(
    text: str, tools: Schemas, begin: str, end: str, call_at: Callable[[str, int, Schemas], tuple[ToolCall, int]]
) -> Iterator[Found]:
    """Find every ``begin call end``.

    Args:
        call_at: returns the call at a place of the text, and where it ends; ``end`` must follow it.
    """
    at = 0
    while (begun := text.find(begin, at)) >= 0:
        inside, reached = begun + len(begin), 0

        def one(inside: int = inside) -> ToolCall:
            nonlocal reached
            call, stop = call_at(text, inside, tools)
            closing = re.compile(r"\s*" + re.escape(end)).match(text, stop)
            if closing is None:
                raise MalformedError
            reached = closing.end()
            return call

        call = read(one)
        if isinstance(call, Malformed):
            closed, again = text.find(end, inside), text.find(begin, inside)
            # a call that was never closed ends where the next one begins
            closed = len(text) if closed < 0 else closed + len(end)
            reached = min(closed, again) if again >= 0 else closed
        yield Found(begun, reached, call)
        at = reached
