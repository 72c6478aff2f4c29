"""Anthropic's messages: the body as a chat, and the answer as a message, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from ..chat.streamed import Streamed, Told
from ..rollout import Completion
from .answers import UNREADABLE, Answer, Reader
from .schema import ChatBody, Length, Name, Strict, Telemetry, Text, functions_only, only

Array = npt.NDArray[Any]
TEXT: dict[str, Any] = {"type": "text", "text": ""}
THINKING: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
"""The empty blocks of an answer; what is thought has no signature here."""
STOPS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "error": "end_turn",
    UNREADABLE: "max_tokens",
}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Types of errors by HTTP status; `api_error` otherwise."""


class Block(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # cache_control, citations
    type: Text
    text: str | None = None
    id: Text | None = None
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    content: Any = None
    is_error: bool | None = None


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[Any, only("custom")] = None
    cache_control: Any = None  # equal prefixes are found without it
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[Any, only(False)] = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Telemetry):
    """The body of ``/v1/messages/count_tokens``."""

    messages: Annotated[list[Turn], Field(min_length=1)]
    model: Text | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[Annotated[MessagesTool, functions_only("custom")]], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # what the model thinks is in its text
    cache_control: Any = None
    output_config: Annotated[Any, only({})] = None
    context_management: Annotated[Any, only()] = None

    @property
    def ignored(self) -> list[str]:
        """Fields that have no effect though they ask for one."""
        return [] if (self.thinking or {}).get("type", "disabled") == "disabled" else ["thinking"]

    def chat(self) -> ChatBody:
        """Return the body of a chat that asks for the same.

        Raises:
            ValueError: it holds a block that is no text and no call or result of a tool, or its last message is the
                assistant's.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            said = self.system if isinstance(self.system, str) else _texts(self.system, "system")
            messages.append({"role": "system", "content": said})
        for i, turn in enumerate(self.messages):
            if isinstance(turn.content, str):
                of_turn = [{"role": turn.role, "content": turn.content}]
            elif turn.role == "assistant":
                of_turn = [_said(turn.content, f"messages.{i}.content")]
            else:
                of_turn = _heard(turn.role, turn.content, f"messages.{i}.content")
            if of_turn and messages and of_turn[0]["role"] == messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n\n{of_turn.pop(0)['content']}"  # the protocol combines turns of a user
            messages += of_turn
        if not any(message["role"] in ("user", "tool") for message in messages):
            raise ValueError("`messages` has no content of a user; give at least one text.")
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "The last message is the assistant's, and this server does not continue messages; end with a user's."
            )
        choice, name = None, None
        if self.tool_choice is not None:
            choice = {"any": "required", "auto": "auto", "none": "none"}.get(self.tool_choice.type)
            name = self.tool_choice.name
            if choice is None and name is None:
                raise ValueError("`tool_choice` of type 'tool' needs a `name`.")
        one = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        functions = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in self.tools or ()
        ]
        named = None if name is None else {"type": "function", "function": {"name": name}}
        return ChatBody.model_validate(
            {
                "messages": messages,
                "model": self.model,
                "tools": functions or None,
                "tool_choice": named if choice is None else choice,
                "parallel_tool_calls": False if one else None,
                **self._sampling(),
            }
        )

    def _sampling(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountBody):
    """The body of ``/v1/messages``; ``seed`` and ``min_p`` are those of a chat."""

    max_tokens: Length
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=64)] | None = None
    stream: bool | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    container: Annotated[Any, only()] = None
    mcp_servers: Annotated[Any, only([])] = None
    inference_geo: Annotated[Any, only()] = None

    def _sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_tokens")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _texts(blocks: Sequence[Block], where: str) -> str:
    for i, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            raise ValueError(f"`{where}.{i}` is of type '{block.type}'; this model reads text only.")
    return "\n".join(block.text or "" for block in blocks)


def _said(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    """Return a message of the assistant: its text, its calls and its thinking."""
    texts, calls, thoughts = [], [], []
    for i, block in enumerate(blocks):
        thinking = (block.model_extra or {}).get("thinking")
        if block.type == "thinking" and isinstance(thinking, str):
            thoughts.append(thinking)
        elif block.type == "tool_use":
            if block.id is None or block.name is None or block.input is None:
                raise ValueError(f"`{where}.{i}` is a tool_use; it needs `id`, `name` and `input`.")
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts.append(_texts([block], f"{where}[{i}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return message | ({"tool_calls": calls} if calls else {})


def _heard(role: str, blocks: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: results of tools and text, in their order."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise ValueError(f"`{where}.{i}` is a tool_result; it needs `tool_use_id`.")
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}.{i}")}
            )
            continue
        text = _texts([block], f"{where}[{i}]")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages


def _result(block: Block, where: str) -> str:
    """Return the text of a tool's result; that of an error says so."""
    content = block.content
    if content is not None and not isinstance(content, str):
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ValueError(f"`{where}.content` is neither a text nor a list of blocks.")
        content = _texts([Block.model_validate(part) for part in content], f"{where}.content")
    text = content or ""
    return f"error: {text}" if block.is_error and not text.lower().startswith("error") else text


def too_long(prompt: int, requested: int, limit: int) -> str:
    """Return Anthropic's words for a prompt that is too long, alone or with the answer; lengths are in tokens."""
    if prompt > limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum."
    return (
        f"prompt is too long: {prompt} tokens > {max(limit - requested, 0)} maximum, as input length and `max_tokens` "
        f"exceed context limit: {prompt} + {requested} > {limit}, decrease input length or `max_tokens` and try again."
    )


def error(message: str, status: int) -> dict[str, Any]:
    """Format an error as Anthropic does."""
    return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": message}}


class MessageForm(Reader):
    """Formats the answer to one body of ``/v1/messages``; arguments as for `Form`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, body: MessagesBody, stop: Sequence[str], **more: Any
    ) -> None:
        super().__init__(tokenizer, stop, **more)
        self._model, self._id = model, f"msg_{secrets.token_hex(12)}"

    def whole(
        self, prompts: Sequence[Sequence[int]], choices: Sequence[Sequence[Completion]], scored: Any = (), **_: Any
    ) -> dict[str, Any]:
        """Return the message; there is one prompt with one choice."""
        ((completion,),) = choices
        answer = self.read(completion)
        return self._message(_blocks(answer), len(prompts[0]), len(completion.token_ids)) | _stop(answer)

    def _message(self, blocks: list[dict[str, Any]], read: int, written: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(read, written),
        }

    # -- streams ----------------------------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events before any text."""
        return _event("message_start", message=self._message([], len(prompts[0]), 0))

    def part(self, index: int, choice: Streamed, told: Told, records: Array) -> str:
        """Return the events for what is new."""
        thinks, speaks = choice.opens(told)
        said = _opened(0, THINKING) if thinks else ""
        said += _delta(0, "thinking", told.reasoning)
        place = int(bool(choice.reasoning))
        if speaks:
            said += (_closed(0) if place else "") + _opened(place, TEXT)
        return said + _delta(place, "text", told.text)

    def last(self, index: int, choice: Streamed, completion: Completion, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events that end the answer, or an error where its text is not what was sent of it."""
        answer = self.read(completion)
        rest = self.rest(choice, answer)
        if rest is None:
            return self.failed("The tokenizer changed text that was sent; ask again without `stream`.")
        said, at = "", 0
        if choice.reasoning or (rest.reasoning and not choice.text):
            if not choice.text:  # the reasoning is still open, or was not begun
                said += ("" if choice.reasoning else _opened(0, THINKING)) + _delta(0, "thinking", rest.reasoning)
                said, rest = said + _closed(0), rest._replace(reasoning="")
            at = 1
        if choice.text or rest.text or not (answer.calls or at):
            said += ("" if choice.text else _opened(at, TEXT)) + _delta(at, "text", rest.text) + _closed(at)
            at += 1
        if rest.reasoning:  # what was thought after the text had begun
            said += _opened(at, THINKING) + _delta(at, "thinking", rest.reasoning) + _closed(at)
            at += 1
        for place, block in enumerate(_calls(answer), at):
            said += _opened(place, {**block, "input": {}})
            spelt = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            said += _event("content_block_delta", index=place, delta=spelt) + _closed(place)
        counts = _usage(len(prompts[0]), len(completion.token_ids))
        return said + _event("message_delta", delta=_stop(answer), usage=counts) + _event("message_stop")

    def failed(self, message: str, status: int = 500, code: str | None = None) -> str:
        """Return the event that tells an error in a stream."""
        return f"event: error\ndata: {json.dumps(error(message, status))}\n\n"

    def close(self, prompts: Sequence[Sequence[int]], written: int) -> str:
        """Return the events after the answer."""
        return ""


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """Return the blocks of an answer; one without anything has an empty text."""
    thought = [{**THINKING, "thinking": answer.reasoning}] if answer.reasoning else []
    text = [{**TEXT, "text": answer.text}] if answer.text or not (answer.calls or thought) else []
    return [*thought, *text, *_calls(answer)]


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in answer.calls]


def _stop(answer: Answer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.stop is not None and answer.reason == "stop" else STOPS[answer.reason]
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}


def _usage(read: int, written: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": read, "output_tokens": written, **cached}


def _opened(place: int, block: dict[str, Any]) -> str:
    return _event("content_block_start", index=place, content_block=block)


def _delta(place: int, kind: str, text: str) -> str:
    delta = {"type": f"{kind}_delta", kind: text}
    return _event("content_block_delta", index=place, delta=delta) if text else ""


def _closed(place: int) -> str:
    return _event("content_block_stop", index=place)


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"
