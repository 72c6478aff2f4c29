"""Episodes of Harbor's tasks as environments: the tool ``shell`` in the task's container, the reward by its tests."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...chat.messages import Message
from ...errors import UserError
from ..chat.turns import Observation, ToolBox, calls_of
from .setup import Setup, pool_of
from .task import COLUMN, Task
from .trial import Trial

SHARE = 0.9
"""Part of a step's time that its commands may take; the rest is for killing them."""


class HarborEpisode:
    """An episode in the container of a task.

    Args:
        context: of a prompt from a folder of tasks; its ``tools`` are offered too.
        setup: the options of containers.
        output_bytes: the longest answer to a command; the middle of a longer one is left out.

    Raises:
        UserError: the prompt is of no task, or the task cannot be used.
    """

    def __init__(self, context: Mapping[str, Any], setup: Setup, output_bytes: int) -> None:
        if COLUMN not in context:
            raise UserError('harbor needs prompts of tasks; set data.format to "harbor" and data.path to their folder.')
        if output_bytes < 1:
            raise UserError("The option `output_bytes` of harbor must be at least 1.")
        self._options = (context, setup, output_bytes)
        self._task, self._most = Task(Path(context[COLUMN])), output_bytes
        self._pool = pool_of(setup)
        self._task.network(none=setup.network == "none")
        self._left = self._task.config.agent.timeout_sec or float("inf")
        others = [tool for tool in context["tools"] if isinstance(tool, str) or COLUMN not in tool]
        self._box = ToolBox({"tools": others})
        self._trial = Trial(self._pool, self._task)
        self._seconds = 0.0
        weakref.finalize(self, self._trial.close).atexit = False

    def check(self) -> None:
        """Start a container of the task and end it.

        Raises:
            UserError: it cannot be started.
        """
        self._pool.check(self._task)

    def ahead(self) -> None:
        """Begin to start the container."""
        self._trial.ahead()

    def open(self, messages: Sequence[Message], seconds: float) -> None:
        """Wait for the container."""
        self._box.open(messages, seconds)
        self._trial.open()
        self._seconds = seconds

    async def step(self, messages: Sequence[Message]) -> Observation:
        """Run the commands of the last message; a message that calls no tool ends the episode."""
        calls, answers = calls_of(messages[-1]), []
        end = time.monotonic() + SHARE * self._seconds
        for call in calls:
            if call.error or call.name != "shell":
                answers.append(call.answer(call.error or await self._box.call(call.name, call.arguments)))
                continue
            command = call.arguments.get("command")
            if set(call.arguments) != {"command"} or not isinstance(command, str):
                answers.append(call.answer("error: shell takes one argument, the text `command`"))
                continue
            answers.append(call.answer(await asyncio.to_thread(self._run, command, end)))
            if self._left <= 0:
                return Observation(answers, done=True, truncated=True)
        return Observation(answers, done=not calls)

    def _run(self, command: str, end: float) -> str:
        begin = time.monotonic()
        seconds = max(min(end - begin, self._left), 0.1)
        output = self._trial.run(command, seconds, self._most)
        self._left -= time.monotonic() - begin
        text = output.text.rstrip("\n")
        if output.code == 0:
            return text
        why = f"killed after {seconds:.3g} s" if output.code is None else f"exit code {output.code}"
        return f"{text}\n({why})" if text else f"({why})"

    def judge(self) -> float:
        """Run the tests and return their reward; the episode is over.

        Raises:
            UserError: there is none.
        """
        self._trial.open()
        return self._trial.verify()["reward"]

    def close(self) -> None:
        """Remove the container."""
        self._box.close()
        self._trial.close()

    def fork(self) -> HarborEpisode:
        """Return another episode that has not begun."""
        return HarborEpisode(*self._options)
