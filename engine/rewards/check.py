"""Checks before a run that responses to its problems can be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..errors import UserError
from ..settings import RewardConfig, TaskConfig
from .interface import Rewards
from .parts import task_names
from .references import reference_text

NEED_TEXT = {"math", "exact", "regex"}
"""Verifiers that need a reference answer with a text."""
TOGETHER = 1024
"""Problems that the verifier reads together."""


def check_references(
    rewards: Rewards,
    config: RewardConfig,
    problems: Iterable[tuple[str, dict[str, Any]]],
    tasks: Sequence[TaskConfig] = (),
    *,
    all_known: bool = False,
    further: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Let the verifier read each problem once; return a sentence about those that it cannot read, or an empty text.

    Args:
        rewards: the run's verifier, started.
        problems: the id and the entry of each (`Prompt.id`, `Prompt.entry`).
        tasks: `data.tasks`.
        all_known: the run has no other problems than these and ``further``, so that `when` of a part must name a task
            of theirs.
        further: entries that the verifier does not read now; they are looked through where ``problems`` lack a task.

    Raises:
        UserError: a reference answer is missing or has no text, or a larger share than `reward.max_unreadable` cannot
            be read; or `when` of a part names no task of the data.
    """
    task_of, found_tasks = task_names(tasks), set[str | None]()
    has_text = text_check(config, tasks)
    count, unread = 0, list[tuple[str, str]]()
    left = iter(problems)
    while chunk := dict(islice(left, TOGETHER)):
        for problem, entry in chunk.items():
            found_tasks.add(task_of(entry))
            has_text(problem, entry)
        checked = zip(chunk, rewards.check(list(chunk.values())), strict=True)
        unread += [(problem, why) for problem, why in checked if why is not None]
        count += len(chunk)
    if all_known:
        _check_tasks(config, found_tasks, map(task_of, further))
    if not unread:
        return ""
    problem, why = unread[0]
    share = len(unread) / count
    what = f"{len(unread)} of {count} problems cannot be judged, such as '{problem}': {why.rstrip('.')}"
    if share > config.max_unreadable:
        raise UserError(
            f"{what}; mend these rows, name another column (data.answer_key), or raise reward.max_unreadable = "
            f"{config.max_unreadable:g}."
        )
    return f"{what}. Responses to these are counted as failed (reward.on_failure = '{config.on_failure}')"


def text_check(config: RewardConfig, tasks: Sequence[TaskConfig] = ()) -> Callable[[str, Mapping[str, Any]], None]:
    """Return a function of a problem's id and entry that raises UserError if its reference answer has no text and a
    verifier needs one."""
    task_of = task_names(tasks)
    parts = [(part.verifier, f"the part '{part.name}' (reward.parts)", part.judges) for part in config.parts]
    only = (config.verifier, f"reward.verifier = '{config.verifier}'", lambda task: True)
    need_text = [(what, judges) for verifier, what, judges in parts or [only] if verifier in NEED_TEXT]

    def check(problem: str, entry: Mapping[str, Any]) -> None:
        for what, judges in need_text:
            if judges(task_of(entry)):
                try:
                    reference_text(entry.get("answer"))
                except ValueError as error:
                    raise UserError(
                        f"The row of '{problem}' cannot be judged by {what}: {error}; mend the row, or name another "
                        "column (data.answer_key)."
                    ) from None

    return check


def _check_tasks(config: RewardConfig, found_tasks: set[str | None], further: Iterator[str | None]) -> None:
    named_tasks = {task for part in config.parts for task in part.tasks}
    while not named_tasks <= found_tasks and (chunk := set(islice(further, TOGETHER))):
        found_tasks |= chunk
    named = sorted(task for task in found_tasks if task is not None)
    for part in config.parts:
        if unknown := sorted(set(part.tasks) - set(named)):
            has = f"they have {', '.join(named[:20])}" if named else "they have no column 'task' of texts"
            raise UserError(
                f"`when` of the part '{part.name}' (reward.parts) names the task '{unknown[0]}', which no row of the "
                f"data has; {has}."
            )
