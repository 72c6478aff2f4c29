"""The answer of an environment to a turn of the model, and the environment that runs the tools of `data.tools`."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...chat.messages import Message, call_id
from ..servers.background import BACKGROUND
from ..servers.mcp import Link, LostError, find_server
from .toolbox import find_chat_tool, tool_name


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to a turn."""

    messages: Sequence[Mapping[str, Any]] = ()
    """The messages to the model, each with a ``role`` and a ``content``."""
    done: bool = False
    """True if the conversation ends here; its messages are then not used."""
    reward: float | None = None
    """The reward of this turn; a response's reward is the sum over its turns."""
    truncated: bool = False
    """True if a limit of the environment ended the conversation, and not its task; the status is then LENGTH."""


class ToolBox:
    """The tools of `data.tools`, those of servers among them; a turn without a call is the answer.

    Args:
        context: of a prompt, or anything with ``tools`` as in `data.tools`.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        self.tools: dict[str, Any] = {}
        self._links: dict[str, Link] = {}
        self._seconds = 0.0
        for tool in context["tools"]:
            if isinstance(tool, str):
                self.tools[tool_name(tool)] = find_chat_tool(tool)
                continue
            link = Link(find_server(tool))
            for schema in link.server.schemas():
                name = schema["function"]["name"]
                self._links[name], self.tools[name] = link, partial(link.call, name)

    def open(self, messages: Sequence[Message], seconds: float) -> None:
        """Begin the sessions of the servers that the last message calls; ``seconds`` are those of the next step."""
        self._seconds = seconds
        for call in calls_of(messages[-1]):
            if call.name in self._links:
                self._links[call.name].open()

    def close(self) -> None:
        """End the sessions of servers."""
        for link in self._links.values():
            link.close()

    def step(self, messages: Sequence[Message]) -> Observation:
        """Run the calls of the last message, one after the other; what is no call is answered by an error."""
        answers, end = [], time.monotonic() + self._seconds
        for call in calls_of(messages[-1]):
            left = end - time.monotonic()
            answers.append(call.answer(call.error or self.answer(call.name, call.arguments, left)))
        return Observation(answers, done=not answers)

    def answer(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
        """Return the result of `call`, in a thread without an event loop; waiting for a server takes no place.

        Raises:
            TimeoutError: it took longer than ``seconds``.
        """
        work = self.call(name, arguments)
        if name in self._links:
            return BACKGROUND.wait(work, seconds)
        return asyncio.run(within(work, seconds))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of a tool as text, or ``error: ...`` where it raises.

        Raises:
            LostError: the tool's server has ended.
        """
        try:
            result = self.tools[name](**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except LostError:
            raise
        except Exception as error:  # for the model to read
            return f"error: {type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any] | None:
        """A conversation with tools is in its messages alone, unless a server has a session of its own for it."""
        return None if any(link.has_state for link in self._links.values()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to take over."""


async def within(work: Awaitable[Any], seconds: float) -> Any:
    """Return the result of ``work``, which is cancelled after ``seconds``.

    Raises:
        TimeoutError: it took longer.
    """
    return await asyncio.wait_for(work, seconds)


@dataclass(frozen=True)
class ToolCall:
    """A call in a turn of the model, or what opens as one and is none."""

    id: str
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """The reason why it is none, for the model."""

    def answer(self, content: str) -> Message:
        """Return the message that answers the call."""
        named = {"name": self.name} if self.name else {}
        return {"role": "tool", "tool_call_id": self.id, **named, "content": content}


def calls_of(message: Message) -> list[ToolCall]:
    """Return what the model's message calls, in its order."""
    calls = iter(message.get("tool_calls", []))
    errors = {bad["index"]: bad["error"] for bad in message.get("invalid_tool_calls", [])}
    read = []
    for place in range(len(message.get("tool_calls", [])) + len(errors)):
        if place in errors:
            read.append(ToolCall(call_id(place), error=errors[place]))
            continue
        call = next(calls)
        read.append(ToolCall(call.get("id", call_id(place)), call["function"]["name"], call["function"]["arguments"]))
    return read
