"""Groups that were recorded teach what they would have taught at once, without sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolltree.engine.app.cli import main
from rolltree.engine.loop.controller import Controller
from rolltree.engine.loop.replay import read_groups


def train(toml: Path, directory: Path, name: str, *options: str) -> int:
    given = ["--evaluation.problems=0", "--evaluation.every=0", f"--output_dir={directory}", f"--name={name}"]
    return main(["train", str(toml), *given, *options])


def weights(directory: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(directory / name / "export" / "model.safetensors")


@pytest.mark.check(but=1)
@pytest.mark.usefixtures("without_report")
def test_a_replay_learns_without_sampling(toml: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "groups.safetensors"
    assert main(["rollout", str(toml), "--prompts", "13", "--record", str(file)]) == 0
    assert len(read_groups(file)) == 13
    assert main(["rollout", str(toml), "--prompts", "1", "--record", str(file)]) == 2
    assert "exists already; choose another --record" in capsys.readouterr().err
    monkeypatch.setattr(Controller, "advance", None)  # whoever samples fails
    for name in ("a", "b"):
        assert train(toml, tmp_path, name, "--replay", str(file), "--trainer.steps=2") == 0
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    groups = read_groups(file)
    for step, row in enumerate(rows[1:]):
        rewards = [v.value for _, parts in groups[6 * step : 6 * step + 6] for part in parts for v in part.verdicts]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert row["training/rollout_probs_diff_mean"] < (1e-5 if step == 0 else 1)
    ours, again = weights(tmp_path, "a"), weights(tmp_path, "b")
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert train(toml, tmp_path, "a", "--replay", str(file), "--trainer.steps=3", "--resume") == 2
    assert "holds 13 groups, enough for 2 steps of 6" in capsys.readouterr().err


def test_what_cannot_be_replayed_is_refused(toml: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, other)
    for file, options, said in (
        (tmp_path / "none", [], "holds no recorded groups"),
        (other, [], "holds no recorded groups"),
        (other, ["--loop.staleness=1"], "set loop.staleness to 0"),
    ):
        assert train(toml, tmp_path, "x", "--replay", str(file), *options) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
