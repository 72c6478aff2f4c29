"""Checks before a run that responses to its problems can be judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError
from ..settings import RewardConfig, TaskConfig
from .interface import Rewards
from .parts import task_names
from .references import reference_text

NEED_TEXT = {"math", "exact", "regex"}
"""Verifiers that need a reference answer with a text."""


def check_references(
    rewards: Rewards,
    config: RewardConfig,
    problems: Iterable[tuple[str, dict[str, Any]]],
    tasks: Sequence[TaskConfig] = (),
    *,
    all_known: bool = False,
) -> str:
    """Let the verifier read each problem once; return a sentence about those that it cannot read, or an empty text.

    Args:
        rewards: the run's verifier, started.
        problems: the id and the entry of each (`Prompt.id`, `Prompt.entry`).
        tasks: `data.tasks`.
        all_known: the run has no other problems, so that `when` of a part must name a task of theirs.

    Raises:
        UserError: a reference answer is missing or has no text, or a larger share than `reward.max_unreadable` cannot
            be read; or `when` of a part names no task of the data.
    """
    entries = dict(problems)
    task_of = task_names(tasks)
    if all_known:
        _check_tasks(config, {task_of(entry) for entry in entries.values()})
    parts = [(part.verifier, f"the part '{part.name}' (reward.parts)", part.judges) for part in config.parts]
    only = (config.verifier, f"reward.verifier = '{config.verifier}'", lambda task: True)
    for verifier, what, judges in parts or [only]:
        for problem, entry in entries.items():
            if verifier not in NEED_TEXT or not judges(task_of(entry)):
                continue
            try:
                reference_text(entry.get("answer"))
            except ValueError as error:
                raise UserError(
                    f"The row of '{problem}' cannot be judged by {what}: {error}; mend the row, or name another column "
                    "(data.answer_key)."
                ) from None
    found = zip(entries, rewards.check(list(entries.values())), strict=True)
    unread = [(problem, why) for problem, why in found if why is not None]
    if not unread:
        return ""
    problem, why = unread[0]
    share = len(unread) / len(entries)
    what = f"{len(unread)} of {len(entries)} problems cannot be judged, such as '{problem}': {why.rstrip('.')}"
    if share > config.max_unreadable:
        raise UserError(
            f"{what}; mend these rows, name another column (data.answer_key), or raise reward.max_unreadable = "
            f"{config.max_unreadable:g}."
        )
    return f"{what}. Responses to these are counted as failed (reward.on_failure = '{config.on_failure}')"


def _check_tasks(config: RewardConfig, known: set[str | None]) -> None:
    named = sorted(task for task in known if task is not None)
    for part in config.parts:
        if unknown := sorted(set(part.tasks) - set(named)):
            has = f"they have {', '.join(named[:20])}" if named else "they have no column 'task' of texts"
            raise UserError(
                f"`when` of the part '{part.name}' (reward.parts) names the task '{unknown[0]}', which no row of the "
                f"data has; {has}."
            )
