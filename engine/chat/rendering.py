"""The text that a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    generation: bool,
    **options: Any,
) -> str:
    """Return the chat template's text of ``messages``; ``options`` are further variables of the template.

    Raises:
        ValueError: it cannot write these messages.
    """
    talk, tool_schemas = (
        [dict(message) for message in messages],
        None if tools is None else [dict(tool) for tool in tools],
    )
    try:
        return str(
            tokenizer.apply_chat_template(
                talk, tools=tool_schemas, add_generation_prompt=generation, tokenize=False, **options
            )
        )
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"The chat template cannot write messages of {roles_of(messages)}: {said}") from error


def roles_of(messages: Sequence[Message]) -> str:
    """Return the roles of the messages, each once, for an error."""
    return ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
