"""A call of a tool, and how the parts of one are read: names, arguments, JSON within text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .schemas import MalformedError, read_object, value_of

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool that was offered."""
ARGUMENTS = ("arguments", "parameters")
"""The keys under which models write the arguments of a call in JSON."""
BESIDE = ("name", "id", "type", *ARGUMENTS)
"""The keys of a call in JSON."""


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


def checked(value: Any, tools: Schemas) -> ToolCall:
    """Return the call that a JSON value ``{"name": ..., "arguments": {...}}`` makes.

    ``parameters`` is read as ``arguments``, a text that is a JSON object as that object, and OpenAI's form, with both
    below ``function``, too.

    Raises:
        MalformedError: it is no call of an offered tool; the message says what is wrong with its arguments.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and set(value) <= {"function", "id", "type"}:
        value = value["function"] | {key: value[key] for key in ("id",) if key in value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in tools:
        raise MalformedError
    name, argument_keys = value["name"], [key for key in ARGUMENTS if key in value]
    if unknown := next((key for key in value if key not in BESIDE), None):
        raise MalformedError(f"the call of {name} has '{unknown}'; write its arguments as an object under 'arguments'")
    if len(argument_keys) > 1:
        raise MalformedError(f"the call of {name} has 'arguments' and 'parameters'; write them once")
    arguments: Any = value[argument_keys[0]] if argument_keys else {}
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = read_object(arguments)
        except ValueError as error:
            said = str(error) if isinstance(error, MalformedError) else "they are a text that is no JSON object"
            raise MalformedError(f"the arguments of {name} cannot be read: {said}") from None
    arguments = {} if arguments in ("", None) or (isinstance(arguments, str) and not arguments.strip()) else arguments
    if not isinstance(arguments, dict):
        raise MalformedError(f"the arguments of {name} are no JSON object")
    call_id = value.get("id")
    valid_id = isinstance(call_id, str) and re.fullmatch(r"[\w-]{1,64}", call_id)
    return ToolCall(name, arguments, call_id if valid_id else None)


def typed(name: str, texts: Mapping[str, str], tools: Schemas) -> ToolCall:
    """Return a call whose arguments were written as bare text.

    Raises:
        MalformedError: the tool was not offered, or a text is no value that its schema allows.
    """
    if name not in tools:
        raise MalformedError
    root = tools[name]
    schemas = root.get("properties")
    schemas = schemas if isinstance(schemas, Mapping) else {}
    values = {
        key: value_of(text, schemas.get(key, {}), root, f"argument '{key}' of {name}") for key, text in texts.items()
    }
    return ToolCall(name, values)


def read(call: Callable[[], ToolCall]) -> ToolCall | Malformed:
    """Return the call that ``call`` returns, `Malformed` where it raises."""
    try:
        return call()
    except MalformedError as error:
        return Malformed(str(error))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return Malformed()


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
