"""Runs that distil whole distributions of a hybrid, and with pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltree.engine.app.cli import main

from ...support.picture_run import metrics, write_run
from ..loop import test_hybrid_run

TERM = '--algorithm.terms=[{name="near",divergence="forward_kl"}]'


@pytest.mark.slow
@pytest.mark.usefixtures("without_report")
def test_with_pictures(tmp_path: Path) -> None:
    """The policy's copy, of the same pictures, teaches nothing before the first update and something after it."""
    toml = write_run(tmp_path)
    assert main(["train", str(toml), TERM, f"--roles.teacher.path={tmp_path}/model"]) == 0
    first, second = [row for row in metrics(tmp_path) if "near/divergence" in row]
    assert abs(first["near/divergence"]) < 1e-6 < second["near/divergence"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_report")
def test_of_a_hybrid(tmp_path: Path) -> None:
    first, second = test_hybrid_run.train(tmp_path, TERM, f"--roles.teacher.path={tmp_path}/model")
    assert abs(first["near/divergence"]) < 1e-6 < second["near/divergence"]
