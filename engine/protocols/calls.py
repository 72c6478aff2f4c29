"""The protocols by their paths, and a request of any of them as one `Call`: a chat, and the form of its answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from . import anthropic, form
from .answers import NewId, random_id
from .anthropic import CountBody, MessageForm, MessagesBody
from .form import Form
from .prompts import forced_tool, offered_tools
from .responses import ResponseForm, ResponsesBody
from .schema import ChatBody, Strict

Body = TypeVar("Body", bound=Strict)
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""The paths that answer chats."""
COUNT = "/v1/messages/count_tokens"
TAGS = ("str", "int", "namespace")
"""Parts of the places of mistakes that are no names of a body."""


AnswerForm = Form | ResponseForm | MessageForm
"""The form of the answer to one request."""


@dataclass(frozen=True)
class Call:
    """A request for answers to a chat."""

    chat: ChatBody
    body: Any
    """The request itself, `chat` where the protocol is the chats'."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that ask for something and have no effect."""

    def form(
        self, tokenizer: PreTrainedTokenizerBase, model: str, stop: tuple[str, ...], new_id: NewId = random_id
    ) -> AnswerForm:
        """Return the form of the answer.

        Args:
            model: the model's name in it.
            stop: texts that end the answer.
            new_id: gives calls of tools their ids.

        Raises:
            ValueError: the tool that is to be called is not there.
        """
        more: dict[str, Any] = {
            "tool": forced_tool(self.chat),
            "tools": offered_tools(tokenizer, self.chat),
            "most_calls": 1 if self.chat.parallel_tool_calls is False else None,
            "new_id": new_id,
        }
        if isinstance(self.body, ChatBody):
            return Form(tokenizer, model, self.body, stop, chat=True, logprobs=bool(self.chat.logprobs), **more)
        if isinstance(self.body, ResponsesBody):
            return ResponseForm(tokenizer, model, self.body, stop, **more)
        return MessageForm(tokenizer, model, self.body, stop, **more)


def read_call(path: str, raw: bytes) -> Call:
    """Return the request that a body makes.

    Args:
        path: one of `CHATS`, or `COUNT`.

    Raises:
        ValueError: the body is no request of the protocol, or asks for what the server does not have.
    """
    if path == "/v1/chat/completions":
        chat = parse(ChatBody, raw)
        return Call(chat, chat)
    if path == "/v1/responses":
        request = parse(ResponsesBody, raw)
        return Call(_told(request.chat), request)
    body: CountBody = parse(CountBody if path == COUNT else MessagesBody, raw)
    return Call(_told(body.chat), body, tuple(body.ignored))


def parse(kind: type[Body], raw: bytes) -> Body:
    """Return the checked body.

    Raises:
        ValueError: it has another form; the sentence names the place.
    """
    checked = _told(partial(kind.model_validate_json, raw))
    json.loads(raw, parse_float=_finite, parse_constant=_finite)
    return checked


def _finite(spelt: str) -> float:
    if not math.isfinite(value := float(spelt)):
        raise ValueError(f"The body holds the number {spelt[:40]}, which is no finite one; give another.")
    return value


def _told(make: Callable[[], Body]) -> Body:
    try:
        return make()
    except ValidationError as wrong:
        first = wrong.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if "[" not in str(part) and part not in TAGS)
        if first["type"] == "not_a_function":
            raise ValueError(f"`{where}` {first['msg']}.") from None
        raise ValueError(f"`{where}`: {first['msg']}." if where else f"{first['msg']}.") from None


def refusal(path: str, message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in the form of the path's protocol."""
    if is_anthropic(path):
        return anthropic.error(message, status)
    return form.error(message, form.kind_of(status), code)


def is_anthropic(path: str) -> bool:
    """Return whether a path is one of Anthropic's protocol."""
    return "/v1/messages" in path
