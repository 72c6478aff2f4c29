"""The table of what does not go together: every row refuses what it is about, at its stage, and nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.app.assembly.checks import check_training, tried_methods
from rolltree.engine.app.assembly.policies import policies_methods
from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config
from rolltree.engine.errors import RefusedError
from rolltree.engine.settings import TrainConfig
from rolltree.engine.settings.capabilities import (
    MODELS,
    OF_KEYS,
    PARTS,
    STAGES,
    TRAINING,
    Model,
    Part,
    Row,
    refuse,
)

from . import cases, later_cases

EVERY = [row for rows in STAGES.values() for row in rows]


def named(row: Row[Any]) -> tuple[str, str]:
    return row.feature, row.other


def title(row: Row[Any]) -> str:
    return f"{row.feature} with {row.other}"


def check(row: Row[Any], says: str, refused: Callable[[], object], allowed: Callable[[], object]) -> None:
    """Check that the row refuses the first and that nothing refuses the second."""
    with pytest.raises(RefusedError) as error:
        refused()
    sentence = "; ".join(filter(None, (row.why, row.remedy)))
    pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(sentence))
    told = [refusal for refusal in error.value.refusals if re.fullmatch(pattern, refusal)]
    assert [says in refusal for refusal in told] == [True], error.value.refusals
    assert not any(word in told[0] for word in ("{", "}"))
    allowed()


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capabilities") / "config.toml"
    path.write_text('name = "x"\n[model]\npath = "m"\n[data]\ntasks = [{ name = "chain_sum" }]\n')
    return path


def load(toml: Path, flags: str) -> TrainConfig:
    return load_config(toml, [f"--{flag}" for flag in flags.split("  ") if flag])


def make(config: TrainConfig) -> None:
    """Make and check the parts of a training that need no model."""
    check_training(config)
    tried_methods(config)
    policies_methods(config)


def test_rows_have_names_of_their_own_and_a_remedy() -> None:
    assert len(set(map(named, EVERY))) == len(EVERY)
    assert [title(row) for row in EVERY if not row.remedy and not row.why.startswith("give ")] == []


def test_every_row_has_a_case() -> None:
    assert set(map(named, OF_KEYS)) == set(cases.OF_KEYS)
    assert set(map(named, TRAINING)) == set(later_cases.TRAINING)
    assert {*map(named, PARTS), *map(named, MODELS)} == {*later_cases.PARTS, *later_cases.FACTS}


@pytest.mark.slow(but=71)
@pytest.mark.check(but=41)
@pytest.mark.parametrize("row", OF_KEYS, ids=title)
def test_keys(toml: Path, row: Row[Any]) -> None:
    flags, neighbour, says = cases.OF_KEYS[named(row)]
    check(row, says, lambda: load(toml, flags), lambda: load(toml, neighbour))


@pytest.mark.parametrize(("flags", "says"), cases.FURTHER)
def test_further_keys(toml: Path, flags: str, says: str) -> None:
    with pytest.raises(RefusedError) as refused:
        load(toml, flags)
    told = [refusal for refusal in refused.value.refusals if says in refusal]
    assert len(told) == 1, refused.value.refusals


@pytest.mark.parametrize("row", TRAINING, ids=title)
def test_trainings(toml: Path, row: Row[Any]) -> None:
    flags, neighbour, says = later_cases.TRAINING[named(row)]
    refused, allowed = load(toml, flags), load(toml, neighbour)
    check(row, says, lambda: check_training(refused), lambda: check_training(allowed))


@pytest.mark.parametrize("row", [row for row in PARTS if named(row) in later_cases.PARTS], ids=title)
def test_parts(toml: Path, row: Row[Any]) -> None:
    flags, neighbour, says = later_cases.PARTS[named(row)]
    refused, allowed = load(toml, flags), load(toml, neighbour)
    refuse(TRAINING, refused)
    check(row, says, lambda: make(refused), lambda: make(allowed))


@pytest.mark.parametrize("row", [row for row in (*PARTS, *MODELS) if named(row) in later_cases.FACTS], ids=title)
def test_facts(toml: Path, row: Row[Any]) -> None:
    facts, others, says = later_cases.FACTS[named(row)]
    config = load(toml, f"trainer.ranks=2  trainer.tensor=2  {cases.ENGINES}  {cases.VLLM}")

    def decide(facts: dict[str, Any]) -> None:
        if row in PARTS:
            refuse(PARTS, Part(config, "key", "name", **facts))
        else:
            refuse(MODELS, Model(config, **facts))

    check(row, says, lambda: decide(facts), lambda: decide(others))


def test_several_refusals_are_counted_and_a_dry_run_tells_all(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--evaluation.every=5", "--evaluation.problems=0", "--data.disjoint=true"]
    last = "`evaluation.every` is given but `evaluation.problems` is 0; give both or neither"
    assert main(["train", str(toml), "--dry-run", *keys]) == 2
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["refused", "refused"]
    assert told.out.splitlines()[1] == f"refused            {last}."
    assert told.err.startswith(
        f"rolltree: '{toml}' with --evaluation.every, --evaluation.problems, --data.disjoint: `da"
    )
    assert told.err.endswith("or leave it out (1 more mistake after this one).\n")
    assert main(["train", str(toml), *keys]) == 2
    assert capsys.readouterr().out == ""
