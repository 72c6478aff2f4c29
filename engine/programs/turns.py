"""What an environment answers to a turn of the model, and the environment that runs the tools of `data.tools`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .chat import Message, find_chat_tool, tool_name
from .tool_calls import BEGIN


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn."""

    messages: Sequence[Mapping[str, Any]] = ()
    """What is said to the model, each a ``role`` and a ``content``."""
    done: bool = False
    """Whether the conversation ends here; the messages are then not read by anybody."""
    reward: float | None = None
    """Of this turn; a response's reward is the sum over its turns."""


class ToolBox:
    """The tools of `data.tools`; a turn without a call is the answer."""

    def __init__(self, context: Mapping[str, Any]) -> None:
        self.tools = {tool_name(name): find_chat_tool(name) for name in context["tools"]}

    async def step(self, messages: Sequence[Message]) -> Observation:
        """Run the calls of the last message, one after the other."""
        last = messages[-1]
        calls = last.get("tool_calls", [])
        if not calls and BEGIN not in last["content"]:
            return Observation(done=True)
        if not calls:
            known = ", ".join(self.tools)
            return Observation([{"role": "tool", "content": f"error: that is no call of a tool; there are {known}"}])
        said = [(call["function"]["name"], await self._call(**call["function"])) for call in calls]
        return Observation([{"role": "tool", "name": name, "content": content} for name, content in said])

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = self.tools[name](**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except Exception as error:  # the model is who has to know
            return f"error: {type(error).__name__}: {error}"

    def state_dict(self) -> dict[str, Any]:
        """A conversation with tools is in its messages alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to take over."""
