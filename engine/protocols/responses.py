"""OpenAI's Responses: the body as a chat, and the answer as a response, whole or as events.

Nothing is stored, so a body holds its whole conversation. An answer is a message where it has text, then its calls.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from transformers import PreTrainedTokenizerBase

from ..chat.streamed import Streamed, Told
from ..rollout import Completion
from .answers import Answer, Called, Reader
from .form import kind_of
from .schema import ChatBody, Length, Name, Strict, Telemetry, Text, functions_only, only

Array = npt.NDArray[Any]
TEXTS = ("input_text", "output_text", "text")
"""Types of parts that are text."""
STATUS = {"length": "incomplete", "error": "failed"}


def _stateless(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("stateless", "Responses are not stored here; send the whole conversation as `input`")
    return value


Stateless = Annotated[Any, BeforeValidator(_stateless)]


class Item(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    type: Text = "message"
    namespace: Text | None = None
    role: Text | None = None
    content: Any = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: str | None = None
    output: Any = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, only(False)] = None


class Namespace(Strict):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[Annotated[FunctionTool, functions_only("function")]]


class Shown(NamedTuple):
    """A function as the model is told of it."""

    name: str
    """Its own name, after that of its namespace where another function has it too."""
    namespace: str | None
    function: FunctionTool
    description: str | None
    """Its own, after that of its namespace if it is the first there."""


class NamedFunction(Strict):
    type: Literal["function"]
    name: Name


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


AnyTool = Annotated[FunctionTool | Namespace, Field(discriminator="type"), functions_only("function", "namespace")]


class TextOptions(Strict):
    format: Format | None = None
    verbosity: Text | None = None


class Reasoning(Strict):
    effort: Text | None = None  # a variable of the chat template
    summary: Text | None = None  # accepted without effect: an answer's thinking is in its text
    generate_summary: Text | None = None


class StreamOptions(Strict):
    include_obfuscation: Annotated[Any, only(False)] = None


class ResponsesBody(Telemetry):
    """The body of ``/v1/responses``; ``seed``, ``top_k``, ``min_p`` and ``stop`` are those of a chat."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    model: Text | None = None
    tools: Annotated[list[AnyTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    max_output_tokens: Length | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # what is stored could only be asked for by what is refused below
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none

    previous_response_id: Stateless = None
    conversation: Stateless = None
    prompt: Annotated[Any, only()] = None
    background: Annotated[Any, only(False)] = None
    max_tool_calls: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None
    service_tier: Annotated[Any, only("auto", "default")] = None

    @property
    def functions(self) -> list[Shown]:
        """The functions of ``tools``, those of namespaces among them."""
        every: list[tuple[FunctionTool, Namespace | None, bool]] = []
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                every.append((tool, None, False))
            else:
                every += [(function, tool, at == 0) for at, function in enumerate(tool.tools)]
        times = Counter(function.name for function, _, _ in every)
        shown = []
        for callee, space, first in every:
            if space is None:
                shown.append(Shown(callee.name, None, callee, callee.description))
                continue
            name = callee.name if times[callee.name] == 1 else f"{space.name}.{callee.name}"
            said = [space.description, callee.description] if first else [callee.description]
            shown.append(Shown(name, space.name, callee, "\n".join(filter(None, said)) or None))
        return shown

    def chat(self) -> ChatBody:
        """Return the body of a chat that asks for the same.

        Raises:
            ValueError: it holds an item or a part that is no text and no call of a function.
        """
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        shown = {(function.namespace, function.function.name): function.name for function in self.functions}
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        open_turn = False  # the last message is the assistant's, and the next calls are its
        thought: dict[str, Any] = {}  # the reasoning of the assistant's next message
        for i, item in enumerate(items):
            speaks = item.type in ("function_call", "reasoning") or item.role == "assistant"
            if thought and not speaks:  # the turn ended with its reasoning
                messages.append({"role": "assistant", "content": ""} | thought)
                thought = {}
            if item.type == "function_call":
                if not open_turn:
                    messages.append({"role": "assistant", "content": ""} | thought)
                    thought = {}
                messages[-1].setdefault("tool_calls", []).append(_call_of(item, i, shown))
                open_turn = True
            elif item.type == "function_call_output":
                said = _text(item.output, f"input.{i}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": said})
                open_turn = False
            elif item.type == "message" and item.role is not None:
                said = _text(item.content, f"input.{i}.content")
                messages.append({"role": item.role, "content": said} | (thought if item.role == "assistant" else {}))
                open_turn, thought = item.role == "assistant", {}
            elif item.type == "reasoning":
                thought, open_turn = _thought(item, f"input.{i}"), False
            else:
                raise ValueError(
                    f"`input.{i}` is of type '{item.type}'; this server takes messages with a role, reasoning, "
                    "function_call and function_call_output."
                )
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.function.parameters}
            for tool in self.functions
        ]
        kept = ("model", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream")
        return ChatBody.model_validate(
            {name: getattr(self, name) for name in kept}
            | {
                "messages": messages,
                "tools": [{"type": "function", "function": function} for function in functions] or None,
                "tool_choice": choice,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": _format(self.text),
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "verbosity": None if self.text is None else self.text.verbosity,
            }
        )


def _format(options: TextOptions | None) -> dict[str, Any] | None:
    if options is None or (form := options.format) is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None or form.name is None:
        raise ValueError("`text.format` of type 'json_schema' needs a `name` and a `schema`.")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _call_of(item: Item, place: int, shown: Mapping[tuple[str | None, str], str]) -> dict[str, Any]:
    if item.name is None or item.arguments is None or item.call_id is None:
        raise ValueError(f"`input.{place}` is a function_call; it needs `call_id`, `name` and `arguments`.")
    name = shown.get((item.namespace, item.name), item.name)
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments}}


def _thought(item: Item, where: str) -> dict[str, Any]:
    """Return the reasoning of an item as a field of a message; a summary is what stands for it."""
    parts = item.content or (item.model_extra or {}).get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise ValueError(f"`{where}` is a reasoning item whose parts are no texts.")
    text = "\n".join(part["text"] for part in parts)
    return {"reasoning_content": text} if text else {}


def _text(content: Any, where: str) -> str:
    """Return a text, or text parts joined by line breaks.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"`{where}` is neither a text nor a list of parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            raise ValueError(f"`{where}.{i}` is of type '{kind}'; this model reads text parts only.")
        texts.append(part["text"])
    return "\n".join(texts)


class ResponseForm(Reader):
    """Formats the answer to one body of ``/v1/responses``; arguments as for `Form`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model: str, body: ResponsesBody, stop: Sequence[str], **more: Any
    ) -> None:
        super().__init__(tokenizer, stop, **more)
        self._body, self._model = body, model
        self._shown = {function.name: function for function in body.functions}
        self._id, self._message_id = f"resp_{secrets.token_hex(24)}", f"msg_{secrets.token_hex(24)}"
        self._reasoning_id = f"rs_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._number = 0

    def whole(
        self, prompts: Sequence[Sequence[int]], choices: Sequence[Sequence[Completion]], scored: Any = (), **_: Any
    ) -> dict[str, Any]:
        """Return the response; there is one prompt with one choice."""
        ((completion,),) = choices
        answer = self.read(completion)
        return self._response(answer, self._items(answer), len(prompts[0]), len(completion.token_ids))

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        status = "incomplete" if answer.reason == "length" else "completed"
        items = [self._reasoning(answer.reasoning, status)] if answer.reasoning else []
        if answer.text or not (answer.calls or items):
            items.append({**self._message(status), "content": [_part(answer.text)]})
        return items + [self._call_item(call, status) for call in answer.calls]

    def _call_item(self, call: Called, status: str) -> dict[str, Any]:
        shown = self._shown.get(call.name)
        fields = {"call_id": call.id, "name": call.name if shown is None else shown.function.name}
        space = {} if shown is None or shown.namespace is None else {"namespace": shown.namespace}
        kind = {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call"}
        return {**kind, **fields, **space, "arguments": call.arguments, "status": status}

    def _reasoning(self, text: str, status: str) -> dict[str, Any]:
        parts = [{"type": "reasoning_text", "text": text}] if text else []
        return {"id": self._reasoning_id, "type": "reasoning", "summary": [], "content": parts, "status": status}

    def _message(self, status: str) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": []}

    def _response(
        self, answer: Answer | None, items: list[dict[str, Any]], read: int = 0, written: int = 0
    ) -> dict[str, Any]:
        body, reason = self._body, None if answer is None else answer.reason
        counts = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedFunction) else body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reason is None else STATUS.get(reason, "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else counts,
            "user": body.user,
        }

    # -- streams ----------------------------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events before any text."""
        kinds = ("response.created", "response.in_progress")
        return "".join(self._event(kind, response=self._response(None, [])) for kind in kinds)

    def part(self, index: int, choice: Streamed, told: Told, records: Array) -> str:
        """Return the events for what is new."""
        thinks, speaks = choice.opens(told)
        said = self._begins(0) if thinks else ""
        said += self._think_delta(0, told.reasoning)
        place = int(bool(choice.reasoning))
        if speaks:
            said += (self._thought(0, choice.reasoning) if place else "") + self._opened(place)
        return said + self._delta(place, told.text)

    def _begins(self, place: int) -> str:
        return self._event("response.output_item.added", output_index=place, item=self._reasoning("", "in_progress"))

    def _think_delta(self, place: int, text: str) -> str:
        where = {"item_id": self._reasoning_id, "output_index": place, "content_index": 0}
        return self._event("response.reasoning_text.delta", **where, delta=text) if text else ""

    def _thought(self, place: int, text: str, status: str = "completed") -> str:
        """Return the events that end reasoning."""
        where = {"item_id": self._reasoning_id, "output_index": place, "content_index": 0}
        done = self._event("response.reasoning_text.done", **where, text=text)
        return done + self._event("response.output_item.done", output_index=place, item=self._reasoning(text, status))

    def _opened(self, place: int) -> str:
        where = {"item_id": self._message_id, "output_index": place, "content_index": 0}
        added = self._event("response.output_item.added", output_index=place, item=self._message("in_progress"))
        return added + self._event("response.content_part.added", **where, part=_part(""))

    def _delta(self, place: int, text: str) -> str:
        where = {"item_id": self._message_id, "output_index": place, "content_index": 0}
        return self._event("response.output_text.delta", **where, delta=text, logprobs=[]) if text else ""

    def last(self, index: int, choice: Streamed, completion: Completion, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events that end the answer, or an error where its text is not what was sent of it."""
        answer = self.read(completion)
        rest = self.rest(choice, answer)
        if rest is None:
            return self.failed("The tokenizer changed text that was sent; ask again without `stream`.")
        items = self._items(answer)
        if choice.text and not any(item["type"] == "message" for item in items):
            # the text that was told has turned out to be white space before a call
            items.insert(bool(answer.reasoning), {**self._message("completed"), "content": [_part("")]})
        if choice.text and answer.reasoning and not choice.reasoning:  # it was thought after the text had begun
            items[0], items[1] = items[1], items[0]
        said = ""
        for at, item in enumerate(items):
            if item["type"] == "reasoning" and not (choice.reasoning and choice.text):
                said += "" if choice.reasoning else self._begins(at)
                said += self._think_delta(at, rest.reasoning) + self._thought(at, answer.reasoning, item["status"])
            elif item["type"] == "message":
                place = {"item_id": self._message_id, "output_index": at, "content_index": 0}
                said += ("" if choice.text else self._opened(at)) + self._delta(at, rest.text)
                said += self._event("response.output_text.done", **place, text=answer.text, logprobs=[])
                said += self._event("response.content_part.done", **place, part=_part(answer.text))
                said += self._event("response.output_item.done", output_index=at, item=item)
            elif item["type"] == "function_call":
                place = {"item_id": item["id"], "output_index": at}
                empty = {**item, "arguments": "", "status": "in_progress"}
                said += self._event("response.output_item.added", output_index=at, item=empty)
                said += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                done = {"name": item["name"], "arguments": item["arguments"]}
                said += self._event("response.function_call_arguments.done", **place, **done)
                said += self._event("response.output_item.done", output_index=at, item=item)
        kind = STATUS.get(answer.reason, "completed")
        whole = self._response(answer, items, len(prompts[0]), len(completion.token_ids))
        return said + self._event(f"response.{kind}", response=whole)

    def failed(self, message: str, status: int = 500, code: str | None = None) -> str:
        """Return the events that tell an error in a stream, and end the response."""
        told = {"code": code or kind_of(status), "message": message}
        response = {**self._response(None, []), "status": "failed", "error": told}
        return self._event("error", **told, param=None) + self._event("response.failed", response=response)

    def close(self, prompts: Sequence[Sequence[int]], written: int) -> str:
        """Return the events after the answer."""
        return ""

    def _event(self, kind: str, **data: Any) -> str:
        number, self._number = self._number, self._number + 1
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **data})}\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
