"""Rows about verifiers."""

from __future__ import annotations

from ..keys import RunKeys
from ..rewards import GROUP_JUDGES
from .row import Fires, Row


def _both_conditions(run: RunKeys) -> Fires:
    names = [part.name for part in run.reward.parts if part.when_wrong is not None and part.when_right is not None]
    return bool(names) and {"name": names[0]}


def _waiting_judge_of_groups(run: RunKeys) -> Fires:
    waiting = [part for part in run.reward.parts if part.waits_for is not None]
    names = [part.name for part in waiting if part.group or part.verifier in GROUP_JUDGES]
    return bool(names) and {"name": names[0]}


def _same_part(run: RunKeys) -> Fires:
    names = [part.name for part in run.reward.parts]
    twice = [name for name in names if names.count(name) > 1]
    return bool(twice) and {"name": twice[0]}


def _alone_beside_parts(run: RunKeys) -> Fires:
    both = {"verifier", "options"} & run.reward.model_fields_set if run.reward.parts else set[str]()
    return bool(both) and {"key": max(both)}


def _group_of_a_name(run: RunKeys) -> Fires:
    names = [part.verifier for part in run.reward.parts or (run.reward,) if part.group and ":" not in part.verifier]
    return bool(names) and {"verifier": names[0]}


def _part_of_a_role(run: RunKeys) -> Fires:
    names = [part.name for part in run.reward.parts if part.role is not None]
    return bool(names) and {"name": names[0]}


def _scheduled(run: RunKeys) -> Fires:
    return bool(run.reward.scheduled) and {"name": run.reward.scheduled[0]}


def _of_no_task(run: RunKeys) -> Fires:
    tasks = {task.name for task in run.data.tasks}
    for part in run.reward.parts if tasks else ():
        if unknown := sorted(set(part.tasks) - tasks):
            return {"name": part.name, "task": unknown[0], "tasks": ", ".join(sorted(tasks))}
    return False


def _judged_by_none(run: RunKeys) -> Fires:
    parts = run.reward.parts
    left = sorted(task.name for task in run.data.tasks if parts and not any(part.judges(task.name) for part in parts))
    return bool(left) and {"task": left[0]}


def _judges_while_sampling(run: RunKeys) -> Fires:
    program = run.rollout.program
    judges = program in ("hints", "mcts") or ":" in program
    return (
        judges
        and run.rollout.most_engines > 0
        and bool(run.reward.scheduled)
        and {
            "program": program,
            "name": run.reward.scheduled[0],
        }
    )


REWARDS: tuple[Row[RunKeys], ...] = (
    Row("`reward.parts.when_wrong`", "`when_right`", _both_conditions,
        "the part '{name}' has `when_wrong` and `when_right`", "leave one out"),
    Row("`reward.parts.when_wrong`, `when_right`", "a judge of groups", _waiting_judge_of_groups,
        "the part '{name}' compares all responses of a group, of which `when_wrong` and `when_right` would leave "
        "some out", "leave the condition out"),
    Row("`reward.parts.name`", "another part of the name", _same_part, "two of `reward.parts` are called '{name}'",
        "give each a name of its own"),
    Row("`reward.verifier`, `reward.options`", "`reward.parts`", _alone_beside_parts,
        "`reward.{key}` does not go with `reward.parts`, which have their own", "leave it out, or make it a part"),
    Row("`reward.group`", "`reward.parts`", lambda run: run.reward.group and bool(run.reward.parts),
        "`reward.group` does not go with `reward.parts`", "give it to the part that judges groups"),
    Row("`reward.group`", "a verifier's name", _group_of_a_name,
        "`group` is for a `verifier` of your own, file.py:function, and '{verifier}' is a name", "leave it out"),
    Row("`reward.hosts`", "a judge of groups", lambda run: run.reward.hosts > 0 and run.reward.by_group,
        "`reward.hosts` get single responses, and a judge of groups compares several", "set `hosts` to 0"),
    Row("`reward.hosts`", 'a verifier "policy"', lambda run: run.reward.hosts > 0 and "policy" in run.reward.verifiers,
        "`reward.hosts` have no rollout engine, which the verifier `policy` asks",
        "set `hosts` to 0, or leave `policy` out"),
    Row("`reward.hosts`", "`reward.parts.role`", lambda run: run.reward.hosts > 0 and _part_of_a_role(run),
        "`reward.hosts` do not know the roles of which the part '{name}' judges one",
        "set `hosts` to 0, or leave its `role` out"),
    Row("`reward.hosts`", "a scheduled `reward.parts.weight`", lambda run: run.reward.hosts > 0 and _scheduled(run),
        "`reward.hosts` do not know the step, which the weight of the part '{name}' follows",
        "set `hosts` to 0, or give the part a number"),
    Row("`rollout.engines` with a program that judges", "a scheduled `reward.parts.weight`", _judges_while_sampling,
        "the program '{program}' judges in the processes of `rollout.engines`, which do not know the step that the "
        "weight of the part '{name}' follows", "set `rollout.engines` to 0, or give the part a number"),
    Row("`reward.parts.when`", "no such `data.tasks`", _of_no_task,
        "`when` of the part '{name}' (`reward.parts`) names '{task}', which is not in `data.tasks`",
        "they are {tasks}"),
    Row("`data.tasks`", "no part that judges one", _judged_by_none,
        "no part of `reward.parts` judges the task '{task}'", "add it to the `when` of one"),
)  # fmt: skip
