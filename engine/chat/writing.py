"""Writes conversations as a chat template does: complete, or refused.

    messages --`plain`--> one form for all doors --`complete`--> what this template writes whole

Some templates leave out what they have no place for: a role, the text next to a call, a name, earlier reasoning. So the
conversation is written once more with a private word in the place of each text, and each word must come out. A template
that drops the reasoning of earlier turns, but writes that of the last one, does so by design, and is let.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from .rendering import Message, render
from .schemas import read_object

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages hold the reasoning of a turn; templates read one of them."""
Field = tuple[int, str]
"""The place of a message, and one of its fields."""


class Written(NamedTuple):
    """A conversation as a template writes it."""

    messages: list[dict[str, Any]]
    """The messages in the form in which the template got them."""
    text: str


class IncompleteError(ValueError):
    """The template leaves out a part of a message."""


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that all doors share, the given ones unchanged.

    Arguments of calls that are the text of a JSON object are objects, a tool's answer has the name of the tool whose
    call it answers, no content of an assistant is an empty text, and leading messages with instructions are one.
    """
    written: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        copied = {key: value for key, value in message.items() if value is not None}
        if copied.get("role") == "assistant":
            copied["content"] = copied.get("content") or ""
        calls = copied.get("tool_calls")
        if isinstance(calls, list):
            copied["tool_calls"] = [_with_object(call) for call in calls]
            names |= dict(_named(copied["tool_calls"]))
            if not calls:
                del copied["tool_calls"]
        elif copied.get("role") == "tool" and "name" not in copied and isinstance(copied.get("tool_call_id"), str):
            copied |= {"name": names[copied["tool_call_id"]]} if copied["tool_call_id"] in names else {}
        written.append(copied)
    leading = list(takewhile(lambda message: message.get("role") in INSTRUCTIONS, written))
    if len(leading) < 2 or not all(isinstance(message.get("content"), str) for message in leading):
        return written
    role = "developer" if all(message["role"] == "developer" for message in leading) else "system"
    joined = "\n\n".join(text for message in leading if (text := message["content"]))
    return [leading[0] | {"role": role, "content": joined}, *written[len(leading) :]]


def complete(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    since: int = 0,
) -> Written:
    """Write plain messages with all that they say, and the generation prompt.

    A developer becomes the system where the template writes none, and arguments of calls are texts where it takes no
    objects.

    Args:
        options: further variables of the template.
        since: the first message of which something may be left out; those before were written earlier.

    Raises:
        ValueError: a role is unknown, or the template cannot write these messages.
        IncompleteError: it leaves out a text, a call, a name or the reasoning of a message.
    """
    template = str(tokenizer.chat_template)
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES and not (isinstance(role, str) and _quotes(template, role)):
            raise ValueError(f"message {i} has the unknown role {role!r}; use {', '.join(ROLES)}.")
    variables, why = json.dumps(options or {}, sort_keys=True, default=str), None
    shown = json.dumps(tools, sort_keys=True, default=str)
    for talk in _forms(messages):
        try:
            text = render(tokenizer, talk, tools, generation=True, **(options or {}))
            lost = _lost(tokenizer, len(tokenizer), template, json.dumps([_shape(m) for m in talk]), shown, variables)
        except ValueError as error:
            why = error if why is None else why
            continue
        lost = tuple((i, field) for i, field in lost if i >= since)
        if not lost:
            return Written(talk, text)
        place, field = lost[0]
        incomplete = IncompleteError(
            f"message {place} ({talk[place]['role']}) has '{field}', which the chat template leaves out; take it "
            "out of the message, or use a template that writes it."
        )
        why = incomplete if not isinstance(why, IncompleteError) else why
    assert why is not None
    raise why


def _forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yield the forms in which a template may take the messages, the given one first."""
    talk = [dict(message) for message in messages]
    for message in talk:
        if reasoning := next((message[key] for key in REASONING if isinstance(message.get(key), str)), ""):
            message |= dict.fromkeys(REASONING, reasoning)
    developer = any(message.get("role") == "developer" for message in talk)
    calls = any(map(_calls_in, talk))
    for as_system in (False, True)[: 1 + developer]:
        for as_text in (False, True)[: 1 + calls]:
            form = copy.deepcopy(talk)
            for message in form:
                if as_system and message.get("role") == "developer":
                    message["role"] = "system"
                if as_text and _calls_in(message):
                    message["tool_calls"] = [_with_text(call) for call in _calls_in(message)]
            yield form


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as clients of OpenAI's protocol send them: arguments of calls as texts, reasoning under one
    key."""
    sent = [{key: value for key, value in message.items() if key not in REASONING[1:]} for message in messages]
    for message in sent:
        if "tool_calls" in message:
            message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
    return sent


# -- what a template leaves out ---------------------------------------------------------------------------------------


def _shape(message: Message) -> dict[str, Any]:
    """Return a message without what it says: equal for messages that a template treats alike."""
    content: Any = message.get("content")
    if isinstance(content, list):
        content = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    elif isinstance(content, str):
        content = bool(content.strip())
    calls = []
    for call in _calls_in(message):
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        empty = not arguments or arguments == "{}"
        calls.append([type(arguments).__name__, empty, isinstance(call, Mapping) and "id" in call])
    fields = {key: bool(message.get(key)) for key in ("name", "tool_call_id") if key in message}
    named = message.get("name") not in (None, "", message.get("role"))
    return {
        "role": message.get("role"),
        "content": content,
        "calls": calls,
        "reasons": any(message.get(key) for key in REASONING),
        "named": named,
        **fields,
    }


@functools.lru_cache(maxsize=4096)
def _lost(
    tokenizer: PreTrainedTokenizerBase, size: int, template: str, shapes: str, tools: str, options: str
) -> tuple[Field, ...]:
    """Return the fields that the template leaves out of messages of these shapes.

    Raises:
        ValueError: it cannot write them.
    """
    talk, words = [], dict[Field, list[str]]()
    for i, shape in enumerate(json.loads(shapes)):
        message, field_words = _worded(i, shape)
        talk.append(message)
        words |= {(i, field): texts for field, texts in field_words.items()}
    shown, variables = json.loads(tools), json.loads(options)
    text = render(tokenizer, talk, shown, generation=True, **variables)
    lost = [(i, field) for (i, field), field_words in words.items() if not all(word in text for word in field_words)]
    kept_last = {
        (i, field)
        for i, field in lost
        if field in REASONING and _writes_last(tokenizer, talk[: i + 1], shown, variables, words[i, field])
    }
    return tuple(field for field in lost if field not in kept_last)


def _writes_last(
    tokenizer: PreTrainedTokenizerBase, talk: Sequence[Message], tools: Any, options: Any, words: Sequence[str]
) -> bool:
    """Return True if the template writes the words of a talk's last message."""
    try:
        text = render(tokenizer, talk, tools, generation=False, **options)
    except ValueError:
        return False
    return all(word in text for word in words)


def _worded(i: int, shape: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a message of a shape with a private word in each place, and the words by field."""
    words: dict[str, list[str]] = {}

    def word(field: str) -> str:
        private = f"zq{i}w{sum(map(len, words.values()))}{field[:3]}x"
        words.setdefault(field, []).append(private)
        return private

    message: dict[str, Any] = {"role": shape["role"]}
    content = shape["content"]
    if isinstance(content, list):
        message["content"] = [
            {"type": kind} | ({"text": word("content")} if kind == "text" else {}) for kind in content
        ]
    elif content is not None:
        message["content"] = word("content") if content else ""
    if shape["calls"]:
        message["tool_calls"] = []
        for j, (kind, empty, has_id) in enumerate(shape["calls"]):
            name = word("tool_calls")
            arguments: Any = {} if empty else {"argument": word("tool_calls")}
            arguments = json.dumps(arguments) if kind == "str" else arguments
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            message["tool_calls"].append(({"id": f"call{i:02d}{j:03d}"} if has_id else {}) | call)
    if shape["reasons"]:
        message |= dict.fromkeys(REASONING, word(REASONING[0]))
    if "tool_call_id" in shape:
        message["tool_call_id"] = f"call{i:05d}"
    if "name" in shape:
        answers = shape["role"] == "tool"  # the call that it answers has the name
        message["name"] = "tool" if answers or not shape["named"] else word("name")
    return message, words


def _quotes(template: str, role: str) -> bool:
    """Return True if a template's source names the role."""
    return f"'{role}'" in template or f'"{role}"' in template


# -- calls ------------------------------------------------------------------------------------------------------------


def _calls_in(message: Message) -> Sequence[Any]:
    """Return the calls of a message; none where they are no list, which templates may refuse."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _with_object(call: Any) -> Any:
    """Return a call whose arguments, which clients send as the text of a JSON object, are that object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return copy.deepcopy(call)
    try:
        return {**call, "function": {**function, "arguments": read_object(function["arguments"])}}
    except ValueError:
        return copy.deepcopy(call)


def _with_text(call: Any) -> Any:
    """Return a call whose arguments are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"))}}


def _named(calls: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield the id and the function's name of each call."""
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str) and isinstance(call.get("id"), str):
            yield call["id"], function["name"]
