"""Rows about prompts, demonstrations and held-out problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..algorithm import AlgorithmConfig, TermConfig
from ..keys import RunKeys
from ..rewards import VERIFIERS
from .row import Fires, Row, against

OF_ROWS = ("difficulty", "gvm", "predicted", "hard_replay", "hardest", "limr", "ladder", "greso", "sgpo")
"""Curricula that need problems which may come again, or columns."""


def _several_sources(run: RunKeys) -> Fires:
    count = sum([bool(run.data.tasks), run.data.path is not None, run.data.source is not None])
    return count > 1 and {"number": "both are" if count == 2 else "all are"}


def _part_of_nothing(run: RunKeys) -> Fires:
    data = run.data
    whole = {
        "subset": (data.path, "`data.path`"),
        "split": (data.path, "`data.path`"),
        "eval_split": (data.eval_path or data.path, "`data.eval_path`"),
        "eval_subset": (data.eval_path or (data.path and data.eval_split), "`data.eval_path` or `data.eval_split`"),
    }
    for key, (place, needed) in whole.items():
        if getattr(data, key) is not None and place is None:
            return {"key": key, "needed": needed}
    return False


def _selecting(run: RunKeys) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of the run that choose demonstrations, each with its options."""
    terms: list[AlgorithmConfig | TermConfig] = [run.algorithm, *run.algorithm.terms]
    for term in terms:
        if isinstance(term, TermConfig) and term.pairs == "chosen_and_rejected":
            yield term.pairs, term.pairs_options
        elif term.select == "demonstrated":
            yield term.select, term.select_options


def _chooses_from_none(run: RunKeys) -> Fires:
    part = next((part for part, _ in _selecting(run)), None)
    return part is not None and not run.demonstrations and {"part": part}


def _chooses_from_another(run: RunKeys) -> Fires:
    tables = [table.name for table in run.demonstrations]
    for part, options in _selecting(run):
        if tables and options.get("of", tables[0]) not in tables:
            return {"part": part, "table": options["of"], "tables": ", ".join(tables)}
    return False


def _pairs_with_weights(run: RunKeys) -> Fires:
    for table in run.demonstrations:
        if table.rejected_key is not None and (table.weight_key or table.logprob_key or table.messages_key):
            return {"name": table.name}
    return False


def _same_table(run: RunKeys) -> Fires:
    names = [table.name for table in run.demonstrations]
    twice = [name for name in names if names.count(name) > 1]
    return bool(twice) and {"name": twice[0]}


def _verifier_of_tasks(run: RunKeys) -> Fires:
    key = "a verifier of `reward.parts`" if run.reward.parts else "`reward.verifier`"
    return (
        run.judges
        and not run.data.tasks
        and "task" in run.reward.verifiers
        and {"key": key, "others": ", ".join(VERIFIERS[1:])}
    )


def _in_no_container(run: RunKeys) -> Fires:
    program, options = run.rollout.program, run.rollout.program_options
    contained = (program == "environment" and options.get("environment") == "harbor") or (
        program == "agent" and "container" in options
    )
    return run.data.format == "harbor" and _samples(run) and not contained


def _samples(run: RunKeys) -> bool:
    return run.trainer.prompts_per_step > 0


DATA: tuple[Row[RunKeys], ...] = (
    Row("`data.tasks`, `data.path`, `data.source`", "each other", _several_sources,
        "give one of `data.tasks`, `data.path` and `data.source`, and {number} given"),
    Row("`data.eval_path`", "`data.tasks`", lambda run: run.data.eval_path is not None and bool(run.data.tasks),
        "`data.eval_path` does not go with `data.tasks`, which generate their own held-out problems", "leave it out"),
    Row("`data.subset`, `split`, `eval_subset`, `eval_split`", "no set on the hub", _part_of_nothing,
        "`data.{key}` chooses a part of a set on the hub", "give {needed} too, or leave it out"),
    Row("`data.format`", "no `data.path` or `data.eval_path`",
        lambda run: run.data.format is not None and run.data.path is None and run.data.eval_path is None,
        "`data.format` is that of `data.path` and `data.eval_path`", "give one of them, or leave it out"),
    Row('`data.format` = "harbor"', "a program without containers", _in_no_container,
        '`data.format` = "harbor" is of tasks in containers',
        'set `rollout.program` to "environment" with environment = "harbor", or to "agent" with `container` among its '
        "options"),
    Row("`data.tools`", "no `data.chat`", lambda run: bool(run.data.tools) and not run.data.chat,
        "`data.tools` are offered by the chat template", "set `data.chat` to true"),
    Row("`data.image_key`", "`data.tasks`", lambda run: run.data.image_key is not None and bool(run.data.tasks),
        "`data.image_key` is a column of `data.path` or `data.source`, and `data.tasks` have no pictures",
        "leave it out"),
    Row("`data.n_key`", "`data.tasks`", lambda run: run.data.n_key is not None and bool(run.data.tasks),
        "`data.n_key` is a column of `data.path` or `data.source`, and `data.tasks` have none", "leave it out"),
    Row("`data.source_options`", "no `data.source`",
        lambda run: bool(run.data.source_options) and run.data.source is None,
        "`data.source_options` apply to `data.source`", "name one, or leave them out"),
    Row("`data.curriculum_options`", "no `data.curriculum`",
        lambda run: bool(run.data.curriculum_options) and run.data.curriculum is None,
        "`data.curriculum_options` apply to `data.curriculum`", "name one, or leave them out"),
    Row("`data.curriculum`", "`data.source`",
        lambda run: run.data.curriculum is not None and run.data.source is not None,
        "`data.curriculum` chooses from `data.path` or `data.tasks`", "a `data.source` chooses itself"),
    Row(f"`data.curriculum` = {', '.join(OF_ROWS)}", "`data.tasks`",
        lambda run: run.data.curriculum in OF_ROWS and bool(run.data.tasks) and {"curriculum": run.data.curriculum},
        "`data.curriculum` = '{curriculum}' needs `data.path`: the problems of `data.tasks` come once, before "
        "anything is known of them", "give a file instead of them"),
    Row("`demonstrations.rejected_key`", "`weight_key`, `logprob_key`, `messages_key`", _pairs_with_weights,
        "`rejected_key` of the demonstrations '{name}' makes pairs, which have neither weights nor log-probs and "
        "begin with a prompt", "leave `weight_key`, `logprob_key` and `messages_key` out"),
    Row("`demonstrations.name`", "another table of the name", _same_table,
        "two tables of `demonstrations` are called '{name}'", "give each a `name` of its own"),
    Row("`demonstrated`, `chosen_and_rejected`", "no `demonstrations`", _chooses_from_none,
        "`{part}` chooses demonstrations, and the run has none", "give `demonstrations`"),
    Row("`demonstrated`, `chosen_and_rejected` `of` a table", "no table of the name", _chooses_from_another,
        "`{part}` chooses demonstrations '{table}', and the tables of `demonstrations` are called {tables}",
        "name one of them"),
    Row("`trainer.prompts_per_step` above 0", "no prompts", lambda run: _samples(run) and run.data.is_empty,
        "give one of `data.tasks`, `data.path` and `data.source`, and none of them is given"),
    Row("`trainer.prompts_per_step` = 0", "no `demonstrations`",
        lambda run: not _samples(run) and not any(table.per_step for table in run.demonstrations),
        "`trainer.prompts_per_step` = 0 samples nothing, and there are no `demonstrations` to train on",
        "give one of them"),
    Row(
        "`evaluation.problems`",
        "no prompts",
        lambda run: (
            not _samples(run) and run.data.is_empty and run.evaluation.problems > 0 and run.data.eval_path is None
        ),
        "`data` has no problems to hold out",
        "name some in `data.eval_path`, or set `evaluation.problems` to 0",
    ),
    *against(
        "`trainer.prompts_per_step` = 0",
        lambda run: not _samples(run),
        "`trainer.prompts_per_step` = 0 samples nothing, so {other} has no effect",
        "leave it out, or sample",
        {
            "loop.staleness above 0": lambda run: run.loop.staleness > 0,
            "loop.callback": lambda run: run.loop.callback is not None,
            "replay": lambda run: run.replay is not None,
            "data.curriculum": lambda run: run.data.curriculum is not None,
            "models": lambda run: bool(run.models),
        },
    ),
    Row('`reward.verifier` = "task"', "no `data.tasks`", _verifier_of_tasks,
        '{key} is "task", which needs `data.tasks`',
        "for other prompts set it to one of {others}, or file.py:function"),
    Row("`evaluation.problems`", "`data.source` without `data.eval_path`",
        lambda run: run.data.source is not None and run.data.eval_path is None and run.evaluation.problems > 0,
        "`data.source` has no held-out problems",
        "name a file of them in `data.eval_path`, or set `evaluation.problems` to 0"),
    Row("`data.disjoint`", "no `demonstrations`", lambda run: run.data.disjoint and not run.demonstrations,
        "`data.disjoint` leaves out prompts of `demonstrations`, and the run has none",
        "give them, with `demonstrations.per_step` = 0 if they are an earlier stage's, or leave it out"),
    Row("`evaluation.problems`", "a judge of groups", lambda run: run.evaluation.problems > 0 and run.reward.by_group,
        "held-out problems are answered once, and a judge of groups cannot judge one response",
        "set `evaluation.problems` to 0"),
    Row("`evaluation.every`", "`evaluation.problems` = 0",
        lambda run: run.evaluation.every > 0 and not run.evaluation.problems,
        "`evaluation.every` is given but `evaluation.problems` is 0", "give both or neither"),
    Row("`evaluation.targets`", "`evaluation.every` = 0",
        lambda run: bool(run.evaluation.targets) and not run.evaluation.every,
        "`evaluation.targets` are looked for at each evaluation, and there is none during the run",
        "set `evaluation.every`"),
)  # fmt: skip
