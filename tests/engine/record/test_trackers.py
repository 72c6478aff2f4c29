"""Trackers get what metrics.jsonl gets, go on where a run is resumed, and never end one."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.record.trackers import Tracked, Trackers


class Stand:
    """A library in trackio's manner."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.asked: list[dict[str, Any]] = []
        self.finished = 0
        self.fails_at = -1

    def init(self, **asked: Any) -> Stand:
        self.asked.append(asked)
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route")
        self.rows[step] = row

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    for name in ("trackio", "wandb"):
        module = types.ModuleType(name)
        module.init = made.init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return made


def run(toml: Path, directory: Path, *overrides: str, resume: bool = False) -> Orchestrator:
    given = [f"--output_dir={directory}", "--trainer.steps=2", "--checkpoint.every=1", *overrides]
    made = build(load_config(toml, given), console=Console(), resume=resume)
    made.run()
    return made


@pytest.mark.slow
def test_a_tracker_gets_every_row_and_goes_on_behind_a_resumed_one(toml: Path, tmp_path: Path, stand: Stand) -> None:
    made = run(toml, tmp_path, '--trackers=["trackio","wandb"]')
    rows = [json.loads(line) for line in (made.options.directory / "metrics.jsonl").read_text().splitlines()]
    assert sorted(stand.rows) == [0, 1, 2]
    for row in rows:
        step = row.pop("step")
        assert stand.rows[step] == {name: value for name, value in row.items() if value is not None}
    assert stand.finished == 2
    first, id_ = stand.asked[0], stand.asked[1]["id"]
    assert (first["name"], first["resume"], first["config"]["trainer"]["steps"]) == ("tiny", "never", 2)
    run(toml, tmp_path, '--trackers=["wandb","trackio"]', "--trainer.steps=3", resume=True)
    assert sorted(stand.rows) == [0, 1, 2, 3]
    assert stand.asked[2]["id"] == id_
    assert stand.asked[3]["resume"] == "allow"


@pytest.mark.check
def test_a_tracker_that_fails_is_told_of_and_left_out(toml: Path, tmp_path: Path, stand: Stand, capsys: Any) -> None:
    stand.fails_at = 1
    made = run(toml, tmp_path, '--trackers=["trackio"]')
    assert made.step == 2
    assert sorted(stand.rows) == [0]
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("The tracker 'trackio' failed and gets no more metrics: ConnectionError: no route") == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_one_that_is_missing_is_named(toml: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(UserError, match=f"pip install {name}"):
        Trackers([name], Tracked("run", toml.parent, {}), 0, print)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_the_library_itself(toml: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name, reason=f"needs {name}")
    config = load_config(toml, [f"--output_dir={tmp_path}", f'--trackers=["{name}"]'])
    config.run_dir.mkdir(parents=True)
    said: list[str] = []
    for begin in (0, 2):
        run = Tracked(config.name, config.run_dir, config.model_dump(mode="json"))
        trackers = Trackers([name], run, begin, said.append)
        trackers.log(begin + 1, {"reward/mean": 0.5, "actor/entropy": float("nan")})
        trackers.close()
    assert said == []
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(config.run_dir / "tensorboard"))
        found.Reload()
        assert found.Tags()["scalars"] == ["reward/mean"]
        assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.5), (3, 0.5)]
    elif name == "wandb":
        assert list(config.run_dir.glob("wandb/offline-run-*/*.wandb"))
    else:
        assert list((tmp_path / "trackio").rglob("*.db"))
