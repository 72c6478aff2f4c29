"""Conversations as a tokenizer's chat template writes them: tools that are offered, calls, and what is said in between.

Token ids that were sampled are never made anew from text. What is added behind them is what the template writes behind
the end of an assistant's turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from ..errors import UserError
from ..parts.resolve import import_object
from .tool_calls import written
from .toolbox import CHAT_TOOLS

Message = dict[str, Any]
"""A ``role``, its ``content``, and of an assistant maybe ``tool_calls`` in OpenAI's form, arguments as objects."""

MARK = "\ue000{}\ue001"
"""Stands for a text while the template is run: private characters, so that no template means them."""


def find_chat_tool(name: str) -> Any:
    """The function that a name of `data.tools` stands for.

    Raises:
        UserError: there is none.
    """
    if name in CHAT_TOOLS:
        return CHAT_TOOLS[name]
    if ":" not in name:
        raise UserError(
            f"data.tools has '{name}', which is not known; use {', '.join(CHAT_TOOLS)}, or name your own as "
            "file.py:function."
        )
    return import_object(name)


def tool_name(name: str) -> str:
    """What the model calls it by."""
    return name if name in CHAT_TOOLS else name.rpartition(":")[2]


def tool_schema(name: str) -> dict[str, Any]:
    """What a chat template is told of a tool.

    Raises:
        UserError: there is none, or its parameters lack types or words in its docstring.
    """
    try:
        schema: dict[str, Any] = get_json_schema(find_chat_tool(name))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.tools has '{name}', which cannot be described to the model: {' '.join(str(error).split())}; give it "
            "types and a docstring with its Args."
        ) from error
    schema["function"]["name"] = tool_name(name)
    return schema


def assistant_message(text: str, tools: Collection[str]) -> Message:
    """What the model has said in a turn, its calls of ``tools`` apart."""
    found = written(text, tools)
    message: Message = {"role": "assistant", "content": found.content}
    if found.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
            for name, arguments in found.calls
        ]
    return message


def added_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens behind the one that ends an assistant's turn: ``messages``, and the beginning of the next turn.

    A message's text becomes no special token, whatever it holds.

    Raises:
        ValueError: the template cannot write these messages, or ends no turn with the end-of-sequence token.
    """
    eos, turn = str(tokenizer.eos_token), MARK.format("turn")
    marked = [{**message, "content": MARK.format(i)} for i, message in enumerate(messages)]
    given = [{"role": "user", "content": "?"}, {"role": "assistant", "content": turn}, *marked]
    try:
        text = str(tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False))
    except Exception as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        said = " ".join(str(error).split())
        raise ValueError(f"The chat template cannot write messages of {roles} behind an assistant's: {said}") from error
    end = text.find(eos, text.find(turn))
    if turn not in text or end < 0 or any(MARK.format(i) not in text[end:] for i in range(len(messages))):
        raise ValueError(
            f"The chat template does not end an assistant's turn with the end-of-sequence token {eos!r}, or leaves "
            "messages behind it out; environments need one that does."
        )
    ids: list[int] = []
    for i, part in enumerate(re.split("\ue000(\\d+)\ue001", text[end + len(eos) :])):
        said = str(messages[int(part)]["content"]) if i % 2 else part
        ids += tokenizer(said, add_special_tokens=False, split_special_tokens=bool(i % 2))["input_ids"]
    return ids
