"""The environments of conversations by name; those of other modules are imported when they are asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...chat.messages import Message
from ...parts.resolve import import_object
from .turns import Observation, ToolBox


class Game:
    """A text environment in gymnasium's manner: ``reset(seed=...)``, and ``step(text)`` that answers five values.

    Args:
        context: of a prompt from `data.source` = "games", or any with a ``seed``.
        make: ``file.py:function`` that makes the environment.

    Raises:
        UserError: there is no such function.
    """

    def __init__(self, context: Mapping[str, Any], make: str) -> None:
        self.env = import_object(make)()
        self.env.reset(seed=int(context["seed"]))

    async def step(self, messages: Sequence[Message]) -> Observation:
        said, reward, terminated, truncated, _ = self.env.step(messages[-1]["content"])
        cut = bool(truncated and not terminated)
        return Observation([{"role": "user", "content": str(said)}], bool(terminated or cut), float(reward), cut)

    def fork(self) -> Game:
        """Another one in the same state."""
        return copy.deepcopy(self)

    def state_dict(self) -> Any:
        """The game's own, where it has one."""
        give = getattr(self.env, "state_dict", None)
        return None if give is None else give()

    def load_state_dict(self, state: Any) -> None:
        self.env.load_state_dict(state)


def _taskset(context: Mapping[str, Any], taskset: str) -> Any:
    """Return the environment of a `verifiers` task, importing the library only when it is asked for."""
    from ..verifiers import TasksetEnvironment

    return TasksetEnvironment(context, taskset)


def _openenv(
    context: Mapping[str, Any],
    url: str | None = None,
    command: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    reset: Sequence[str] | None = None,
    observation: str | None = None,
) -> Any:
    """Return an episode of an OpenEnv server, importing the client only when it is asked for."""
    from ..servers.episode import ServedEpisode

    return ServedEpisode(context, url, command, headers, reset, observation)


def _harbor(
    context: Mapping[str, Any],
    engine: str | Sequence[str] | None = None,
    engine_args: Sequence[str] = (),
    network: str = "task",
    keep_processes: bool = False,
    reward_key: str = "reward",
    containers: int = 16,
    output_bytes: int = 8000,
) -> Any:
    """Return an episode in the container of a Harbor task, importing what that needs only when it is asked for."""
    from ..harbor.episode import HarborEpisode
    from ..harbor.setup import Setup

    setup = Setup.of(
        {
            "engine": engine, "engine_args": engine_args, "network": network, "keep_processes": keep_processes,
            "reward_key": reward_key, "containers": containers,
        }
    )  # fmt: skip
    return HarborEpisode(context, setup, output_bytes)


ENVIRONMENTS: dict[str, Callable[..., Any]] = {
    "tools": ToolBox,
    "game": Game,
    "verifiers": _taskset,
    "openenv": _openenv,
    "harbor": _harbor,
}
