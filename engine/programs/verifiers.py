"""Environments of `verifiers` tasksets (0.4, its `v1`): conversations with tools, scored by the task's own rewards.

A task is a conversation: the prompt, turns with the tools of `data.tools`, and an answer. The task's own ``@reward``
functions and judges score a trace of the conversation. A task that needs a runtime of verifiers (containers, tool
servers, ``setup`` and ``finalize``) is rejected; the harness of verifiers can run it on `rolltree serve`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from ..chat.messages import Message
from ..errors import UserError
from ..parts.resolve import import_object
from .chat.turns import Observation, ToolBox


@functools.cache
def find_taskset(name: str) -> Any:
    """Return the `verifiers.v1.Taskset` that the function named ``file.py:function`` makes.

    Raises:
        UserError: verifiers is not installed, the result is no taskset, or its tasks need a runtime.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise UserError(f"'{name}' is a taskset of verifiers, which is not installed; install `verifiers`.") from error
    taskset = import_object(name)()
    if not isinstance(taskset, vf.Taskset):
        raise UserError(f"'{name}' must make a verifiers.v1.Taskset, and it makes a {type(taskset).__name__}.")
    task = taskset.task_type()
    hooks = [hook for hook in ("setup", "finalize") if getattr(task, hook) is not getattr(vf.Task, hook)]
    if task.NEEDS_CONTAINER or hooks:
        need = "a container" if task.NEEDS_CONTAINER else f"its {hooks[0]}"
        raise UserError(
            f"The tasks of '{name}' need {need}; run them by verifiers' own harness on `rolltree serve` instead."
        )
    return taskset


class _Tasks:
    """Tasks by number, read from the taskset on demand; numbers past the end wrap around."""

    def __init__(self, name: str) -> None:
        self._name, self._read = name, iter(find_taskset(name))
        self._tasks: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        self._tasks += itertools.islice(self._read, max(0, number + 1 - len(self._tasks)))
        if not self._tasks:
            raise UserError(f"The taskset '{self._name}' has no tasks.")
        return self._tasks[number % len(self._tasks)]


find_tasks = functools.cache(_Tasks)


class TasksetEnvironment:
    """Turns with the tools of `data.tools` until one calls none; then the weighted sum of the task's rewards.

    Args:
        context: context of a prompt of `TasksetPrompts`.
        taskset: name of the taskset, ``file.py:function``.
    """

    def __init__(self, context: Mapping[str, Any], taskset: str) -> None:
        self._task = find_tasks(taskset)[int(context["task"])]
        self._tools, self._prompt_length = ToolBox(context), len(context["messages"])

    def step(self, messages: Sequence[Message]) -> Observation | Awaitable[Observation]:
        observation = self._tools.step(messages)
        return self._scored(messages) if observation.done else observation

    async def _scored(self, messages: Sequence[Message]) -> Observation:
        trace = self._trace(messages)
        await self._task.score(trace)
        return Observation(done=True, reward=float(trace.reward))

    def open(self, messages: Sequence[Message], seconds: float) -> None:
        """Begin what the tools need."""
        self._tools.open(messages, seconds)

    def close(self) -> None:
        """End what the tools hold."""
        self._tools.close()

    def fork(self) -> TasksetEnvironment:
        """Return another one, whose tools are its own."""
        other = copy.copy(self)
        other._tools = copy.deepcopy(self._tools)
        return other

    def _trace(self, messages: Sequence[Message]) -> Any:
        """Return the conversation as a trace of verifiers."""
        import verifiers.v1 as vf

        def as_theirs(message: Message) -> Any:
            content = message["content"]
            match message["role"]:
                case "system":
                    return vf.SystemMessage(content=content)
                case "user":
                    return vf.UserMessage(content=content)
                case "tool":
                    return vf.ToolMessage(content=content, tool_call_id=message.get("name", ""))
            called = [call["function"] for call in message.get("tool_calls", [])]
            calls = [vf.ToolCall(id=f["name"], name=f["name"], arguments=json.dumps(f["arguments"])) for f in called]
            return vf.AssistantMessage(content=content, tool_calls=calls or None)

        nodes = [
            vf.MessageNode(
                parent=i - 1 if i else None,
                message=as_theirs(message),
                sampled=i >= self._prompt_length and message["role"] == "assistant",
            )
            for i, message in enumerate(messages)
        ]
        source = self._task
        task = vf.TraceTask(type=type(source).__name__, data=source.data, key=source.key, hash=source.hash)
        return vf.Trace(task=task, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, is_completed=True, ok=True)
