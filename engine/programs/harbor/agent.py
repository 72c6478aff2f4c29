"""Containers of Harbor's tasks for agents' commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UserError
from .setup import Pool, Setup, pool_of
from .task import COLUMN, Task


def agents_pool(options: Mapping[str, Any], episodes: int) -> Pool:
    """Return the pool of a run's agents, with a place for each episode.

    Raises:
        UserError: an option has another form, or there is no engine.
    """
    return pool_of(Setup.of({**options, "containers": episodes}))


def task_of(context: Mapping[str, Any]) -> Task:
    """Return the task of a prompt.

    Raises:
        UserError: it is of none, or the task cannot be used.
    """
    if COLUMN not in context:
        raise UserError(
            'rollout.program_options.container needs prompts of tasks; set data.format to "harbor" and data.path to '
            "their folder."
        )
    return Task(Path(context[COLUMN]))
