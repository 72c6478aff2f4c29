"""``rolltree bench simulate``: the table's columns by formulas of their own, and a driver that is measured."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltree.bench.cli import main
from rolltree.bench.runs import simulate as bench
from rolltree.engine.loop.controller import Controller
from rolltree.engine.plan.modelled import MeasuredRates


@pytest.mark.check
def test_the_driver_is_really_driven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower controller shows. Times decide nothing but that a pause of 0.1 s is at least as long."""
    found = bench.measure_driver(64, engines=4, batch=16)
    assert found.groups == 64
    assert found.group_s > 0
    assert found.told_bytes < 6000
    assert 0 < found.usual_lag_s <= found.lag_s
    collect = Controller._collect
    monkeypatch.setattr(Controller, "_collect", lambda self: (time.sleep(0.1), collect(self))[1])
    slow = bench.measure_driver(64, engines=4, batch=16)
    assert slow.usual_lag_s >= 0.1
    assert slow.groups_s < 16 / 0.1


def tiny() -> Any:
    rates = MeasuredRates(0.01, 0.001, prompt=10)
    made = bench.scenario(8, 0, "H100", lambda seed, n: [100] * n, 10)
    return replace(made, engine=rates, trainer=rates, look_s=0.0, publish_s=0.5, load_s=0.25, start_s=1.0)


def test_shares_follow_from_the_step() -> None:
    made = tiny()
    assert (made.ranks, made.engines, made.budget.batch) == (2, 6, 64)
    driver = bench.Driver(0.1, 2e-6, 5000, 1.0, 1.0, 0.1, 0.1, 1.0, 1)
    row = bench.simulated(made, 3, driver)
    tokens = 64 * 16 * 100 / row.outcome.step_s
    assert row.outcome.tokens_s == pytest.approx(tokens)
    assert row.weights == pytest.approx(0.75 / row.outcome.step_s)
    assert row.driver == pytest.approx(64 * 0.1 / row.outcome.step_s + 2e-6 * tokens)
    assert row.failures_day == pytest.approx(419 / 54 * 8 / 16384)
    assert 0 < row.lost < 1e-3
    assert row.limit.startswith("driver")
    assert bench.simulated(made, 3, None).limit.startswith("weights")


def test_the_command_names_what_is_simulated_and_keeps_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny()
    monkeypatch.setattr(
        bench,
        "scenario",
        lambda gpus, staleness, *_: replace(
            made, budget=replace(made.budget, staleness=staleness), ranks=gpus // 4, engines=gpus - gpus // 4
        ),
    )
    out = tmp_path / "rows.jsonl"
    command = ["simulate", "--gpus", "4", "8", "--staleness", "0", "1", "--groups", "0", "--steps", "2"]
    assert main([*command, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "Simulated, not measured: Qwen3-8B on H100s" in told
    assert told.count("| not measured |") == 4
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["gpus"], row["staleness"]) for row in rows] == [(4, 0), (4, 1), (8, 0), (8, 1)]
    assert main([*command, "--recorded", str(tmp_path)]) == 2
    assert "has no rollouts/step_*.parquet" in capsys.readouterr().err
