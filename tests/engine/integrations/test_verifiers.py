"""Tasksets of verifiers: their prompts, and their own rewards of a conversation."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from rolltree.engine.errors import UserError
from rolltree.engine.programs import EnvironmentTurns
from rolltree.engine.programs.verifiers import TasksetEnvironment
from rolltree.engine.tasks.verifiers import TasksetPrompts

TASKS = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def called(self, trace) -> float:
        return float(len(trace.tool_messages))

    @vf.reward(weight=0.25)
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Prepared(Sum):
    async def setup(self, trace, runtime):
        pass


class Sums(vf.Taskset[Sum]):
    def load(self):
        for i in range(3):
            yield Sum(Data(prompt=f"{i} + 1?", system_prompt="Be brief." if i else None, answer=str(i + 1)))


class Others(vf.Taskset[Prepared]):
    def load(self):
        return iter(())


def make():
    return Sums(vf.TasksetConfig())


def others():
    return Others(vf.TasksetConfig())


def nothing():
    return []
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path / "tasks.py"


def test_prompts_and_rewards_are_the_tasks_own(tasks: Path) -> None:
    pytest.importorskip("verifiers.v1", reason="needs verifiers")
    prompts = TasksetPrompts(f"{tasks}:make", first=1)
    first, _, again = prompts.next(3)
    system = {"role": "system", "content": "Be brief."}
    assert first["prompt"] == [system, {"role": "user", "content": "1 + 1?"}]
    assert again["prompt"] == [{"role": "user", "content": "0 + 1?"}]
    assert prompts.state_dict() == 4
    context = first | {"messages": tuple(first["prompt"]), "tools": ("calculator",)}
    environment = TasksetEnvironment(context, f"{tasks}:make")
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}
    messages = [*first["prompt"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    observed = asyncio.run(environment.step(messages))
    assert [dict(message) for message in observed.messages] == [{"role": "tool", "name": "calculator", "content": "2"}]
    for said, reward in (("2", 1 + 0.5 + 0.5), ("3", 0.5 + 0.5)):
        whole = [*messages, *observed.messages, {"role": "assistant", "content": said}]
        end = asyncio.run(environment.fork().step(whole))
        assert (end.done, end.reward) == (True, reward)
    (other,) = prompts.next(1)
    assert asyncio.run(
        TasksetEnvironment(other | {"messages": other["prompt"], "tools": ()}, f"{tasks}:make").step(
            [*other["prompt"], {"role": "assistant", "content": "2"}]
        )
    ).reward == 1.25  # fmt: skip


def test_what_needs_a_runtime_is_refused(tasks: Path) -> None:
    pytest.importorskip("verifiers.v1", reason="needs verifiers")
    with pytest.raises(UserError, match="need its setup"):
        TasksetPrompts(f"{tasks}:others")
    with pytest.raises(UserError, match="makes a list"):
        TasksetPrompts(f"{tasks}:nothing")


def test_its_absence_and_its_options_are_named(tasks: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'taskset'"):
        EnvironmentTurns("verifiers", {"task_set": f"{tasks}:make"})
    if importlib.util.find_spec("verifiers") is None:
        with pytest.raises(UserError, match="which is not installed"):
            TasksetPrompts(f"{tasks}:make")
