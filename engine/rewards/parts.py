"""Several verifiers in one run (`reward.parts`): the reward is the weighted sum of the parts that judge a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from ..errors import UserError
from ..methods.schedules import at_step, find_schedule
from ..parts.context import Changing, Context
from ..settings import RewardPartConfig, TaskConfig
from .interface import RewardItem, RewardResult, Rewards
from .spans import Span

LARGEST = float(np.finfo(np.float32).max)
TaskOf = Callable[[Mapping[str, Any]], str | None]


def task_names(tasks: Sequence[TaskConfig]) -> TaskOf:
    """Return a function of a problem's entry that returns the name of its task; None if it has none.

    The task is that of `data.tasks`, or the text in the row's column ``task``.
    """

    def task_of(entry: Mapping[str, Any]) -> str | None:
        if tasks:
            index = entry.get("task_index")
            return None if index is None else tasks[index].name
        task = entry.get("task")
        return task if isinstance(task, str) else None

    return task_of


def rightness_of(
    parts: Sequence[RewardPartConfig], task_of: TaskOf, roles: Sequence[str] = ()
) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a function of a problem's entry that returns the part which tells whether its responses are right.

    That is the part that another one names in `when_right`, else the first, of those that judge the problem and read
    the first role, which alone answers held-out problems. None: the reward itself tells it.
    """

    def rightness(entry: Mapping[str, Any]) -> str | None:
        judging = [part for part in parts if part.judges(task_of(entry)) and part.role in (None, *roles[:1])]
        names = [part.name for part in judging]
        named = [part.when_right for part in judging if part.when_right in names]
        return next(iter([*named, *names]), None)

    return rightness


class RewardParts(Rewards):
    """Judges each response by all parts that judge its task.

    The named rewards of a verdict are the parts' own values, NaN where a part does not judge the task, waits for
    another value of another part, or has no verdict; what a part names itself is ``<part>.<name>``. A response has
    no reward if one of its parts failed or skipped it. Spans are multiplied by their part's weight. ``unparsed`` is
    the word of the first part that has one.

    Args:
        parts: the configuration of each part, with its verifier.
        task_of: see `task_names`.
        context: the run's values, at whose step weights that change are taken.
        roles: the roles of the rollout program. A part with a ``role`` reads that role's text; it judges no response
            without one. Held-out answers are of the first role.

    Raises:
        UserError: a weight names no schedule, or a part a role or a part that is not there.
    """

    def __init__(
        self,
        parts: Sequence[tuple[RewardPartConfig, Rewards]],
        task_of: TaskOf,
        context: Context,
        roles: Sequence[str] = (),
    ) -> None:
        self._parts, self._task_of, self._context, self._roles = parts, task_of, context, roles
        self._names = [part.name for part, _ in parts]
        self._later = [bool(rewards.reads_part) or part.waits_for is not None for part, rewards in parts]
        free = [part.name for (part, _), later in zip(parts, self._later, strict=True) if not later]
        for part, rewards in parts:
            if rewards.reads_part and rewards.reads_part not in free:
                raise UserError(
                    f"The part '{part.name}' (reward.parts) reads the part '{rewards.reads_part}', and there is none "
                    "of that name that reads no other; name one in its options."
                )
            if part.waits_for is not None and part.waits_for not in free:
                raise UserError(
                    f"The part '{part.name}' (reward.parts) waits for the part '{part.waits_for}', and there is none "
                    "of that name that waits for no other; name one in its condition."
                )
            first = next((one for one, _ in parts if one.name == part.waits_for), part)
            if first.tasks and not (part.tasks and set(part.tasks) <= set(first.tasks)):
                raise UserError(
                    f"The part '{part.name}' (reward.parts) waits for the part '{first.name}' on tasks that this does "
                    "not judge; give it a `when` of those alone."
                )
            if part.role is not None and part.role not in roles:
                roles_text = f"its roles are {', '.join(roles)}" if roles else "it has one role, which needs no name"
                raise UserError(
                    f"The part '{part.name}' (reward.parts) judges the role '{part.role}', which rollout.program does "
                    f"not play; {roles_text}."
                )
        self._weights = [
            find_schedule(f"reward.parts.{part.name}.weight", part.weight, part.weight_options) for part, _ in parts
        ]
        for (part, _), schedule in zip(parts, self._weights, strict=True):
            if not isinstance(schedule, int | float):
                context.schedules[f"reward.{part.name}.weight"] = Changing(partial(at_step, schedule), context)
        self.in_turn = any(rewards.in_turn for _, rewards in parts)
        self.by_group = any(rewards.by_group for _, rewards in parts)

    def __enter__(self) -> Self:
        with ExitStack() as started:
            for part, rewards in self._parts:
                try:
                    started.enter_context(rewards)
                except UserError as error:
                    raise UserError(f"The part '{part.name}' (reward.parts) cannot be used: {error}") from error
            started.pop_all()
        notes = dict.fromkeys(rewards.note for _, rewards in self._parts if rewards.note)
        self.note = "; ".join(notes)
        return self

    def close(self) -> None:
        for _, rewards in self._parts:
            rewards.close()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        to_judge = [
            {i: read for i in places if (read := self._read_by(part, items[i])) is not None}
            for (part, _), places in zip(self._parts, self._judged([item.entry for item in items]), strict=True)
        ]
        by_part: list[dict[int, RewardResult]] = [{} for _ in self._parts]
        with ThreadPoolExecutor(len(self._parts)) as threads:
            waiting = [
                None
                if rewards.in_turn or later or not part_items
                else threads.submit(rewards.score, list(part_items.values()))
                for (_, rewards), later, part_items in zip(self._parts, self._later, to_judge, strict=True)
            ]
            for k in sorted(range(len(self._parts)), key=self._later.__getitem__):
                (part, rewards), part_items, answer = self._parts[k], to_judge[k], waiting[k]
                if part.waits_for is not None:
                    first = by_part[self._names.index(part.waits_for)]
                    part_items = {
                        i: item for i, item in part_items.items() if i in first and part.wants(first[i].value)
                    }
                if rewards.reads_part:
                    other = by_part[self._names.index(rewards.reads_part)]
                    part_items = {
                        i: replace(item, judged=other[i].value if i in other else None)
                        for i, item in part_items.items()
                    }
                if answer is not None:
                    verdicts = answer.result()
                elif part_items:  # it reads another part, or the engine's own thread asks the policy
                    verdicts = rewards.score(list(part_items.values()))
                else:
                    verdicts = []
                by_part[k] = dict(zip(part_items, verdicts, strict=True))
        now = [at_step(schedule, self._context.step, self._context.metrics) for schedule in self._weights]
        return [self._sum(items[i], [of_part.get(i) for of_part in by_part], now) for i in range(len(items))]

    def _read_by(self, part: RewardPartConfig, item: RewardItem) -> RewardItem | None:
        """Return what a part reads of a response; None if the part's role wrote nothing of it."""
        if part.role is None:
            return item
        roles = {self._roles[0]: item.response_text} if item.roles is None else item.roles
        return replace(item, response_text=roles[part.role]) if part.role in roles else None

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        reasons: list[str | None] = [self._unjudged(entry) for entry in entries]
        for (part, rewards), places in zip(self._parts, self._judged(entries), strict=True):
            for i, why in zip(places, rewards.check([entries[i] for i in places]), strict=True):
                if why is not None:
                    reasons[i] = reasons[i] or f"part '{part.name}': {why}"
        return reasons

    def _judged(self, entries: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Return for each part the indices of the problems that it judges."""
        tasks = [self._task_of(entry) for entry in entries]
        return [[i for i, task in enumerate(tasks) if part.judges(task)] for part, _ in self._parts]

    def _unjudged(self, entry: dict[str, Any]) -> str | None:
        """Return the reason for which no part judges the problem, or None."""
        task = self._task_of(entry)
        if any(part.judges(task) for part, _ in self._parts):
            return None
        return "no part of reward.parts judges " + ("rows without a task" if task is None else f"the task '{task}'")

    def _sum(self, item: RewardItem, verdicts: Sequence[RewardResult | None], weights: Sequence[float]) -> RewardResult:
        """Combine the verdicts of the parts on a response; None: the part does not judge its task."""
        total, named, spans = 0.0, dict[str, float](), list[Span]()
        reason, skipped, unparsed = self._unjudged(item.entry), None, None
        for (part, _), verdict, weight in zip(self._parts, verdicts, weights, strict=True):
            named[part.name] = np.nan
            if verdict is None:
                continue
            named |= {f"{part.name}.{name}": value for name, value in verdict.named.items()}
            if verdict.spans and part.role is not None:
                raise UserError(
                    f"The part '{part.name}' (reward.parts) rewards spans of the text of one role, which have no place "
                    "in the whole response; leave its `role` or the spans out."
                )
            spans += [(begin, end, weight * value) for begin, end, value in verdict.spans]
            reason, skipped = reason or verdict.reason, skipped or verdict.skipped
            unparsed = unparsed or verdict.unparsed
            if verdict.value is not None:
                named[part.name] = verdict.value
                total += weight * verdict.value
        if reason is None and abs(total) > LARGEST:
            reason = f"the sum of the parts is {total:g}, which is not finite in fp32"
        if reason is not None:
            return RewardResult(None, reason, named)
        if skipped is None and all(verdict is None for verdict in verdicts):
            skipped = "no_role"  # no part reads the roles that wrote it
        if skipped is not None:
            return RewardResult(None, None, named, skipped=skipped)
        return RewardResult(total, None, named, spans, unparsed)
