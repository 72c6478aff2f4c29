"""Updates on several ranks equal those of one process, and eight kinds of wrong code do not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.engine import UserError
from rolltree.engine.record.metrics import Sums
from rolltree.engine.train import checkpoint
from rolltree.engine.train.group import ALONE, Group

from ...kernels.on_device import needs_known_order
from ...support.tiny import ROOT, tiny_job
from .rank_runs import (
    CASES,
    EXACT,
    MUTANTS,
    OWN,
    RESUMED,
    USER,
    Result,
    alone,
    differences,
    learn,
    make,
    of_cases,
    of_mutants,
    on_ranks,
    resuming,
    sampled,
    saving,
)

toml = tiny_job({"mine.py": USER})


@pytest.fixture(scope="module")
def trees(toml: Path) -> list[list[Any]]:
    return sampled(toml, 2, 7)


class Alone(dict[str, Result]):
    """The results of one process in each case, computed when they are first asked for."""

    def __init__(self, toml: Path, trees: list[list[Any]]) -> None:
        super().__init__()
        self._given = toml, trees

    def __missing__(self, name: str) -> Result:
        self[name] = alone(*self._given, CASES[name])
        return self[name]


@pytest.fixture(scope="module")
def one(toml: Path, trees: list[list[Any]]) -> Alone:
    return Alone(toml, trees)


QUICK = (
    "tokens, two updates", OWN, "distributions of a teacher of its own", "a mean of batches, chosen tokens",
    *[name for name in ("equal bits, bf16", "equal bits, untied, a critic") if name in CASES],
)  # fmt: skip
"""Cases of `make check`; `make slow` has the others. Those of `RESUMED` are trained and saved in `make check` too."""


@pytest.fixture(scope="module")
def two(toml: Path, trees: list[list[Any]]) -> list[dict[str, Result]]:
    return on_ranks(of_cases, toml.parent, 2, toml, trees, QUICK)


@pytest.fixture(scope="module")
def two_of_others(toml: Path, trees: list[list[Any]]) -> list[dict[str, Result]]:
    return on_ranks(of_cases, toml.parent, 2, toml, trees, [name for name in CASES if name not in QUICK])


@pytest.mark.check
@pytest.mark.parametrize("case", [name for name in QUICK if name not in EXACT])
def test_two_ranks_learn_what_one_process_learns(
    case: str, one: dict[str, Result], two: list[dict[str, Result]]
) -> None:
    for rank in two:
        assert differences(one[case], rank[case]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in CASES if name not in QUICK])
def test_two_ranks_learn_so_in_other_cases(
    case: str, one: dict[str, Result], two_of_others: list[dict[str, Result]]
) -> None:
    for rank in two_of_others:
        assert differences(one[case], rank[case]) == {}
        assert case not in EXACT or same_bits(one[case], rank[case])


def same_bits(one: Result, other: Result) -> bool:
    return all(
        torch.equal(tensor, theirs[name])
        for ours, theirs in ((one.weights, other.weights), (one.gradients, other.gradients))
        for name, tensor in ours.items()
    )


@needs_known_order
@pytest.mark.check
@pytest.mark.parametrize("case", [name for name in EXACT if name in QUICK])
def test_two_ranks_of_a_batch_invariant_model_learn_the_same_bits(
    case: str, one: dict[str, Result], two: list[dict[str, Result]]
) -> None:
    assert all(differences(one[case], rank[case]) == {} and same_bits(one[case], rank[case]) for rank in two)
    assert not same_bits(one["tokens, two updates"], two[0]["tokens, two updates"])  # without the key


@pytest.mark.check
def test_the_metric_of_a_users_loss_does_not_depend_on_micro_batches(
    one: dict[str, Result], two: list[dict[str, Result]]
) -> None:
    """Half of the metric and the objective's mean are the loss that was trained."""
    for result in (one, two[0]):
        for row in result[OWN].rows:
            assert 0.5 * row["own/loss"] + row["actor/pg_loss"] == pytest.approx(row["actor/loss"], rel=1e-6)


SHARPEST = (
    "gradients averaged", "one share for all", "metrics not summed", "fillers keep their selection",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("names", [SHARPEST, [name for name in MUTANTS if name not in SHARPEST]])
def test_wrong_code_differs(names: Sequence[str], toml: Path, trees: list[list[Any]], one: dict[str, Result]) -> None:
    found, _ = on_ranks(of_mutants, toml.parent, 2, toml, trees, names)
    assert list(found) == list(names)
    for name, result in found.items():
        expected = one[MUTANTS[name][0]].rows[: len(result.rows)]
        bad = differences(Result(expected, {}, {}), Result(result.rows, {}, {}))
        assert max(bad.values(), default=0) > 1e-3, name


def divided(group: Group, toml: Path, trees: list[list[Any]]) -> str:
    """Return what is said of preference pairs where the trees do not fit."""
    learner = make(toml, CASES["pairs, recomputed log-probs"], group)
    learner.batches.max_tokens = max(int(tree.path_length.max()) for tree in trees[0])
    with pytest.raises(UserError) as said:
        learner.update(trees[0], [], 1, Sums())
    return str(said.value)


@pytest.mark.slow
def test_pairs_of_a_divided_tree_are_refused_on_all_ranks(toml: Path, trees: list[list[Any]]) -> None:
    for said in on_ranks(divided, toml.parent, 2, toml, trees):
        assert said.startswith("The loss term 'dpo' compares responses of a whole tree, and with trainer.ranks = 2")


@pytest.fixture(scope="module")
def saved(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]], dict[str, Result]]:
    """Checkpoints of two ranks, the trees of three steps, and what the two learn from the last."""
    directory, trees = tmp_path_factory.mktemp("saved"), sampled(toml, 3, 5)
    first, second = on_ranks(saving, toml.parent, 2, toml, trees, directory)
    assert all(differences(first[name], second[name]) == {} for name in RESUMED)
    return directory, trees, first


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_ranks_goes_on(count: int, toml: Path, saved: Any) -> None:
    directory, trees, expected = saved
    assert len(list((directory / RESUMED[0] / "step_000002" / "learner").iterdir())) == 2
    found = resuming(ALONE, toml, trees, directory) if count == 1 else None
    for rank in [found] if found else on_ranks(resuming, toml.parent, count, toml, trees, directory):
        for name in RESUMED:
            assert differences(expected[name], rank[name]) == {}, name


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_file_of_a_rank_is_missed(damage: str, saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[0] / RESUMED[0], tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step_000002"
    (file,) = (path / "learner").glob("shard-00002-*")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(UserError, match=f"'learner/{file.name}'"):
        checkpoint.load(path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # four ranks of two cores take their time
@pytest.mark.parametrize("count", [2, 4])
def test_ten_steps(count: int, toml: Path) -> None:
    trees = sampled(toml, 10, 7)
    ranks = on_ranks(of_cases, toml.parent, count, toml, trees, list(CASES))
    for name, case in CASES.items():
        expected = alone(toml, trees, replace(case, micro_batches_of=count if case.micro_batches_of else 0))
        for rank in ranks:
            assert differences(expected, rank[name]) == {}, name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readmes_model(tmp_path: Path) -> None:
    for name in ("arithmetic_cpu.toml", "arithmetic_warmup.py"):
        text = (ROOT / "examples" / name).read_text()
        (tmp_path / name).write_text(text.replace("runs/models", f"{tmp_path}/models"))
    toml = tmp_path / "arithmetic_cpu.toml"
    trees, names = sampled(toml, 3, 5), ["sequences, a reference that moves, untied", "critic, fewer trees than ranks"]
    ranks = on_ranks(of_cases, tmp_path, 2, toml, trees, names)
    for name in names:
        expected = alone(toml, trees, CASES[name])
        assert expected.rows[0]["actor/grad_norm"] > 1e-3
        for rank in ranks:
            assert differences(expected, rank[name]) == {}, name


def rounded(group: Group, toml: Path, trees: list[list[Any]]) -> Result:
    case = CASES["tokens, two updates"]
    return learn(make(toml, case, group, "--model.dtype=bfloat16"), trees, case)


@pytest.mark.slow
def test_bf16_is_rounded_no_more_than_in_one_process(
    toml: Path, trees: list[list[Any]], one: dict[str, Result]
) -> None:
    """Errors of gradients, against fp32, are those of one process that rounds as much."""
    exact, alike = one["tokens, two updates"], rounded(ALONE, toml, trees)
    for result in on_ranks(rounded, toml.parent, 2, toml, trees):
        for name, gradient in exact.gradients.items():
            mine, theirs = ((other.gradients[name] - gradient).norm() / gradient.norm() for other in (result, alike))
            assert mine < 1.5 * theirs + 1e-3, name
        assert max(differences(alike, result).values(), default=0.0) < 0.1
