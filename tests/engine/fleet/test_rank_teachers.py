"""Several teachers, and teachers on servers, with ranks: they teach what they teach one process, and fail as there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from rolltree.engine import UserError
from rolltree.engine.record.metrics import Sums
from rolltree.engine.train import group as group_module
from rolltree.engine.train.group import Group

from ...support.tiny import tiny_job, write_other
from ..learn.test_teachers import odd
from .rank_runs import Case, alone, differences, make, of_cases, on_ranks, sampled

toml = tiny_job()
TERM = '--algorithm.terms=[{name="distill",divergence="%s"}]'
TWO = "even={path='FOLDER/other'},odd={path='FOLDER/model'}"
MIXED = "even={path='FOLDER/other'},odd={url='URL'}"
SERVED = "even={url='URL'},odd={url='URL',top=3}"
CASES = {
    "distributions of two, of which few batches have both": Case(
        (TERM % "jsd", f"--roles.teachers={{{TWO}}}", "--trainer.max_tokens=96", "--trainer.updates_per_step=2"),
        groups=7,
    ),
    "tokens of two": Case(("--algorithm.objective=opd", f"--roles.teachers={{{TWO}}}", "--trainer.max_tokens=96")),
    "two, fewer trees than ranks": Case(
        ("--algorithm.weight=0", TERM % "forward_kl", f"--roles.teachers={{{TWO}}}"), groups=1, tied=False
    ),
    "one here, one on a server": Case(
        (TERM % "forward_kl", f"--roles.teachers={{{MIXED}}}", "--trainer.max_tokens=96"), groups=3
    ),
    "tokens and distributions, one of them on a server": Case(
        ("--algorithm.objective=opd", TERM % "reverse_kl", f"--roles.teachers={{{MIXED}}}"),
    ),
    "two on servers, fewer trees than ranks": Case(
        ("--algorithm.weight=0", TERM % "forward_kl", f"--roles.teachers={{{SERVED}}}"), groups=1
    ),
    "one on a server": Case(
        ("--algorithm.objective=opd", TERM % "forward_kl", "--roles.teacher.url=URL", "--trainer.max_tokens=96")
    ),
}


@pytest.fixture(scope="module")
def trees(toml: Path) -> list[list[Any]]:
    """Groups of two tasks in turn."""
    write_other(toml)
    steps = sampled(toml, 2, 7)
    for of_step in steps:
        for number, tree in enumerate(of_step):
            tree.meta["task"] = ("even", "odd")[number % 2]
    return steps


class Server:
    """Tells log-probs that depend on the tokens up to each place.

    Attributes:
        wrong: changes the answer, from the number of the question and the answer.
    """

    def __init__(self, toml: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(toml.parent / "model")
        self.wrong: Callable[[int, Any], Any] = lambda number, tables: tables

    def __call__(self, number: int, tables: list[Any]) -> Any:
        tokens = [int(token) for table in tables[1:] for token in table]
        told = [None, *(self._table(tokens[: place + 1]) for place in range(len(tokens)))]
        return self.wrong(number, told)

    def _table(self, tokens: Sequence[int]) -> dict[str, Any]:
        random = np.random.default_rng(tokens)
        ids = {tokens[-1], *random.integers(0, len(self._tokenizer), 4).tolist()}
        values = np.log(random.dirichlet(np.ones(len(ids) + 1))[: len(ids)])
        return {
            str(token): {"logprob": float(value), "decoded_token": self._tokenizer.decode([token])}
            for token, value in zip(sorted(ids), values, strict=True)
        }


@pytest.fixture
def server(toml: Path) -> Iterator[tuple[Server, str, Any]]:
    """The server, its address and the class that counts its questions."""
    answers = Server(toml)
    with odd(answers) as (client, handler):
        yield answers, client.url, handler


def at(url: str, case: Case) -> Case:
    return replace(case, options=tuple(option.replace("URL", url) for option in case.options))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_from_them_what_one_process_learns(
    name: str, toml: Path, trees: list[list[Any]], server: tuple[Server, str, Any]
) -> None:
    _, url, handler = server
    case = at(url, CASES[name])
    one = alone(toml, trees, case)
    questions = handler.questions
    assert questions > 2 if case != CASES[name] else questions == 0
    two = on_ranks(of_cases, toml.parent, 2, toml, trees, [name], {name: case})
    assert handler.questions == 2 * questions
    assert all(differences(one, rank[name]) == {} for rank in two)
    if name.startswith("distributions of two"):
        assert {"distill/divergence/even", "distill/divergence/odd"} <= {key for row in one.rows for key in row}


def told(group: Group, toml: Path, trees: list[list[Any]], case: Case) -> str:
    """Return the error of an update."""
    try:
        make(toml, case, group).update(trees[0][: case.groups], [], 1, Sums())
    except UserError as error:
        return str(error)
    return "nothing"


def of_wrong_tag(group: Group, toml: Path, trees: list[list[Any]], case: Case) -> str:
    trees[0][2].meta["task"] = "third"
    return told(group, toml, trees, case)


def down(number: int, tables: Any) -> Any:
    """The server answers 503 after the two questions of its check and two more."""
    return (503, {"error": "down"}) if number > 4 else tables


def about_others(number: int, tables: Any) -> Any:
    """After its check the server tells of other tokens than were asked for."""
    return tables if number <= 2 else [None, *({"0": next(iter(t.values()))} for t in tables[1:])]


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a task without a teacher": (of_wrong_tag, None, "has the teacher 'third'"),
    "a server that dies": (told, down, "failed 2 times, the last time because it answers 503"),
    "a server of other tokens": (told, about_others, "no log-prob of the token at place"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_what_fails_is_told_by_all_ranks(
    case: str, toml: Path, trees: list[list[Any]], server: tuple[Server, str, Any]
) -> None:
    answers, url, _ = server
    work, wrong, sentence = WRONG[case]
    answers.wrong = wrong or answers.wrong
    teachers = f"--roles.teachers={{even={{url='{url}',retries=1}},odd={{path='FOLDER/other'}}}}"
    first, second = on_ranks(work, toml.parent, 2, toml, trees, Case((TERM % "forward_kl", teachers)))
    assert sentence in first
    assert first == second


def slow(group: Group) -> tuple[int, str]:
    """Wait longer for the first rank than a collective may take."""
    group_module.TELL_S = 0.2
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))

    def work() -> int:
        time.sleep(1.5)
        return dist.get_rank()

    value = group.of_first(work)
    try:
        group.of_first(lambda: [][group.rank])
    except IndexError as error:
        return value, str(error)
    return value, "nothing"


@pytest.mark.check
def test_ranks_wait_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    first, second = on_ranks(slow, tmp_path, 2)
    assert first == second == (0, "list index out of range")
