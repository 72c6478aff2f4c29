"""The experiment "run whole, stop, resume, compare": a run that goes on ends as one that never stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.loop.checkpoints import OPEN
from rolltree.engine.train import checkpoint

from .real_step import share_rewards

CLOCK = ("timing_s/", "perf/", "utilization/")
"""Beginnings of the names of metrics that depend on the clock."""
FIXED = ("--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1", "--trainer.self_check=false")


class Both(NamedTuple):
    """The run that never stopped, and the one that went on from its checkpoint."""

    whole: Orchestrator
    resumed: Orchestrator


def stop_and_resume(
    toml: Path,
    folder: Path,
    *flags: str,
    after: int = 1,
    steps: int = 3,
    wrap: Callable[[Orchestrator], object] = lambda run: None,
    shows: Callable[[dict[str, Any]], object] = lambda state: True,
) -> Both:
    """Check that a run which is killed right after a checkpoint ends as the same run without the kill.

    The whole run's directory is copied when the checkpoint of step ``after`` is complete and its row is not yet
    written, and the copy is resumed.

    Args:
        wrap: called with each run before it begins.
        shows: returns what must be true of the checkpoint's state, so that the comparison shows something.
    """

    def made(name: str, *, resume: bool = False) -> Orchestrator:
        given = [f"--output_dir={folder / name}", f"--trainer.steps={steps}", *FIXED, *flags]
        config = load_config(toml, given)
        run = build(config, console=Console(), resume=resume)
        share_rewards(run, config.reward)
        wrap(run)
        return run

    whole = made("whole")
    save = whole.checkpoints.save

    def save_and_copy(step: int, row: dict[str, float]) -> None:
        save(step, row)
        if step == after:
            shutil.copytree(folder / "whole", folder / "stopped")

    whole.checkpoints.save = save_and_copy  # type: ignore[method-assign]
    whole.run()
    (stopped,) = (folder / "stopped").iterdir()
    latest = checkpoint.latest(stopped / "checkpoints")
    assert latest is not None
    assert shows(checkpoint.load(latest).state), "nothing of this kind was saved"
    resumed = made("stopped", resume=True)
    resumed.run()
    assert_same_run(stopped, whole.options.directory)
    return Both(whole, resumed)


def untimed(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without those metrics that depend on the clock."""
    return [_untimed(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Check that two runs wrote the same metrics and rollouts, and saved the same state, weights and moments, to the
    bit.

    How far groups are that neither run trained depends on what was sampled beside them, so they may differ.
    """
    assert untimed(ours) == untimed(theirs)
    for file in sorted((theirs / "rollouts").glob("*.parquet")):
        tables = [pq.read_table(path).to_pydict() for path in (ours / "rollouts" / file.name, file)]
        assert repr(tables[0]) == repr(tables[1]), file.name  # NaN equals NaN
    last = max((theirs / "checkpoints").glob("step_*")).name
    assert _files(ours) == _files(theirs)
    for name in sorted(_files(theirs)):
        got, expected = _trained(ours / name), _trained(theirs / name)
        assert got.keys() == expected.keys(), name
        assert [key for key in expected if not torch.equal(got[key], expected[key])] == [], name
    got, expected = (checkpoint.load(directory / "checkpoints" / last).state for directory in (ours, theirs))
    assert _untimed(got.pop("metrics")) == _untimed(expected.pop("metrics"))
    for key in expected.keys() - {"groups"}:
        assert got[key] == expected[key], key


def _files(directory: Path) -> set[Path]:
    """Return the tensors of the last checkpoint and of the export."""
    folders: Sequence[Path] = (max((directory / "checkpoints").glob("step_*")), directory / "export")
    return {file.relative_to(directory) for folder in folders for file in folder.rglob("*.safetensors")}


def _trained(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file without those of groups that no step trained."""
    return {name: tensor for name, tensor in load_file(file).items() if not name.startswith(OPEN)}


def _untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(CLOCK)}
