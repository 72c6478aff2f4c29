"""Conversations as a chat template writes them: the tools they offer, the calls they hold, and what they grow by."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .conversation import Conversation
from .ends import turn_end
from .reading import Turn, read_turn
from .rendering import render
from .tool_formats import FORMATS, ToolFormat

Message = dict[str, Any]
"""A ``role``, its ``content``, and of an assistant maybe ``tool_calls`` in OpenAI's form, arguments as objects."""


def find_format(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], name: str | None = None
) -> ToolFormat:
    """Return the form of calls called ``name``, or the one that the chat template teaches.

    That is the form in which the template writes a call, as its parser reads it back; for a template that writes none,
    the one that its prompt speaks of, or else its own text: Transformers 5.23 and later leave out a content of None,
    and some templates write calls of such a message only.

    Args:
        tools: their JSON schemas, as `tool_schema` gives them.

    Raises:
        ValueError: there is none.
    """
    names = ", ".join(FORMATS)
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"environment has no tool_format '{name}'; known are {names}.")
        return FORMATS[name]
    question = [{"role": "user", "content": "?"}]
    unread = False
    for content in ("", None):
        for arguments in ({"where": "here"}, '{"where": "here"}'):
            call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": arguments}}
            talk: list[Message] = [*question, {"role": "assistant", "content": content, "tool_calls": [call]}]
            try:
                whole = render(tokenizer, talk, tools, generation=False)
                turn = whole.removeprefix(render(tokenizer, question, tools, generation=False))
            except ValueError:
                continue
            for form in FORMATS.values():
                read = [(call.name, call.arguments) for call in read_turn(turn, ["look"], form).calls]
                if read == [("look", {"where": "here"})]:
                    return form
            unread |= "look" in turn
    prompt = render(tokenizer, question, tools, generation=True)
    for text in (prompt,) if unread else (prompt, str(tokenizer.chat_template)):
        for form in FORMATS.values():
            if re.search(form.taught, text, re.DOTALL):
                return form
    raise ValueError(
        f"The chat template writes calls of tools in no known form ({names}); name the one that the model was trained "
        "on as tool_format, or use another template."
    )


def assistant_message(turn: Turn, tools: Collection[str] = ()) -> Message:
    """Return a turn of the model as a message.

    Args:
        tools: the names of those that were offered, for errors.

    Returns:
        With calls a message has ``tool_calls``. What opens as a call and is none is in ``invalid_tool_calls``, each
        with its ``index`` among all calls and the ``error`` for the model. Reasoning between special tokens is in
        ``reasoning_content``.
    """
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    places = {place for place, _ in turn.malformed}
    free = (place for place in range(len(turn.calls) + len(places)) if place not in places)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id or call_id(place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in zip(free, turn.calls, strict=True)
        ]
    if turn.malformed:
        no_call = f"error: that is no call of a tool; there are {', '.join(tools)}"
        message["invalid_tool_calls"] = [
            {"index": place, "error": f"error: {call.reason}" if call.reason else no_call}
            for place, call in turn.malformed
        ]
    return message


def call_id(place: int) -> str:
    """Return an id for a call without one: nine letters and digits, as Mistral's templates want it."""
    return f"call{place:05d}"


def added_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    prompt: Sequence[Mapping[str, Any]] = ({"role": "user", "content": "?"},),
) -> list[int]:
    """Return the tokens after the end-of-sequence token of an assistant's first turn: ``messages``, and the next turn.

    Args:
        prompt: the conversation before the turn.

    Raises:
        ValueError: the template cannot write these messages, or ends no turn with the end-of-sequence token.
    """
    end = turn_end(tokenizer, chat=True)
    if end is None:
        raise ValueError("The tokenizer has no end-of-sequence token; set its eos_token.")
    talk = Conversation(tokenizer, None, [end])
    turn = {"role": "assistant", "content": "turn"}
    return talk.grow([*prompt, turn], talk.begin(prompt), messages, end)[0]
