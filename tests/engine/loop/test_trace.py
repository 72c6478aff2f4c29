"""trace.json: events as Perfetto reads them, and a run's account as such events."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import Orchestrator, load_config
from rolltree.engine.app.console import Console
from rolltree.engine.loop.trace import TRACKS, Trace

from ..tiny import write_run


def events(path: Path) -> list[dict[str, Any]]:
    """As readers take it: an array that need not be closed."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def test_events_are_joined_named_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for begin, end in ((1.0, 1.001), (1.002, 1.003), (1.5, 1.6)):
        trace.add("sampler", "decode", begin, end)
    trace.add("learner", "optimizer", 1.1, 1.4)
    trace.flush()
    trace.add("learner", "gen", 2.0, 2.5)
    trace.flush()
    Trace(path).flush()
    names = [event for event in events(path) if event["ph"] == "M"]
    assert [event["args"]["name"] for event in names] == list(TRACKS)
    found = [event for event in events(path) if event["ph"] == "X"]
    assert sorted((event["name"], event["tid"], event["dur"]) for event in found) == [
        ("decode", 1, 3000),
        ("decode", 1, 100000),
        ("gen", 0, 500000),
        ("optimizer", 0, 300000),
    ]
    begin = {event["name"]: event["ts"] for event in found}
    assert begin["gen"] - begin["optimizer"] == pytest.approx(900_000, abs=2)


def test_a_runs_trace_has_the_seconds_of_its_account(tmp_path: Path) -> None:
    toml = write_run(tmp_path)
    made = Orchestrator(load_config(toml, ["--trainer.steps=2"]), console=Console())
    made.run()
    rows = [json.loads(line) for line in (made.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [event for event in events(made.config.run_dir / "trace.json") if event["ph"] == "X"]
    for part in ("gen", "pack", "forward_backward", "head", "optimizer", "eval"):
        traced = sum(event["dur"] for event in found if event["name"] == part) / 1e6
        accounted = sum(row[f"timing_s/{part}"] for row in rows)
        # joined events take in the pauses between them; what is in the account is never less
        assert traced >= 0.99 * accounted - 1e-4
        assert traced <= 1.5 * accounted + 0.1
    assert {event["tid"] for event in found} == {0, 1, 2}
    for track in range(3):
        spans = sorted((event["ts"], event["dur"]) for event in found if event["tid"] == track)
        if track < 2:  # one thing at a time
            assert all(a + d <= b + 100 for (a, d), (b, _) in itertools.pairwise(spans))
