"""The answer of an environment to a turn of the model, and the environment that runs the tools of `data.tools`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...chat.messages import Message, call_id
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


class ToolBox:
    """The tools of `data.tools`; a turn without a call is the answer."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self.tools = {tool_name(name): find_chat_tool(name) for name in context["tools"]}

    async def step(self, messages: Sequence[Message]) -> Observation:
        """Run the calls of the last message, one after the other; what is no call is answered by an error."""
        last = messages[-1]
        calls = iter(last.get("tool_calls", []))
        errors = {bad["index"]: bad["error"] for bad in last.get("invalid_tool_calls", [])}
        answers = []
        for place in range(len(last.get("tool_calls", [])) + len(errors)):
            if place in errors:
                answers.append({"role": "tool", "tool_call_id": call_id(place), "content": errors[place]})
                continue
            call = next(calls)
            function = call["function"]
            content = await self._call(function["name"], function["arguments"])
            fields = {"tool_call_id": call.get("id", call_id(place)), "name": function["name"]}
            answers.append({"role": "tool", **fields, "content": content})
        return Observation(answers, done=not answers)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = self.tools[name](**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except Exception as error:  # for the model to read
            return f"error: {type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        """A conversation with tools is in its messages alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to take over."""
