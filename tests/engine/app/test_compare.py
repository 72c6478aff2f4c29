"""The page on several runs: what is laid over what, the numbers beside each other, and the settings that differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rolltree.engine.app.cli import main
from rolltree.engine.app.report import compare
from rolltree.engine.app.report.run_data import RunData

ROWS = (
    {"step": 0.0, "eval/accuracy": 0.25, "timing_s/step": 10.0, "timing_s/eval": 10.0},
    {"step": 1.0, "reward/mean": 0.5, "timing_s/step": 4.0, "timing_s/gen": 3.0, "rollout/sampled_tokens": 100.0}
    | {"perf/flop_so_far": 7.0},
    {"step": 2.0, "reward/mean": 0.7, "timing_s/step": 6.0, "timing_s/gen": 5.0, "rollout/sampled_tokens": 50.0}
    | {"eval/accuracy": 0.5, "timing_s/eval": 2.0, "perf/flop_so_far": 9.0},
)


def write(directory: Path, config: str, rows=ROWS, *, scale: float = 1.0) -> Path:
    directory.mkdir()
    (directory / "config.toml").write_text(config)
    scaled = [{k: v * scale if k.startswith("timing_s/") else v for k, v in row.items()} for row in rows]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scaled))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = write(tmp_path / "a", 'name = "one"\noutput_dir = "x"\nseed = 0\n[loop]\nstaleness = 0\n')
    second = write(
        tmp_path / "b", 'name = "two"\noutput_dir = "y"\nseed = 0\n[loop]\nstaleness = 1\nwindow = 0.5\n', scale=2
    )
    return [first, second]


def test_one_page_with_both(runs: list[Path], tmp_path: Path, capsys) -> None:
    out = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)
    assert page.count("* plotly.js v") == 1
    assert page.count('class="plotly-graph-div"') == 2  # what was recorded: accuracy and reward
    assert "Recorded by none of the runs: entropy" in page
    text = re.sub(r"<[^>]*>|\s+", " ", page[page.index("<main>") :])
    for row in (
        "held-out accuracy, last 50.0 % 50.0 %",
        "reward, last tenth 0.700 0.700",
        "time 20.0 s 40.0 s",
        "seconds a step, median 6.000 12.000",
        "sampled tokens 150 150",
        "sampling rollouts 4.000 8.000",
        "evaluation 6.000 12.000",
        "the step 10.000 20.000",
        "loop.staleness 0 1",
        "loop.window – 0.5",
    ):
        assert " ".join(row.split()) in " ".join(text.split()), row
    assert "output_dir" not in page
    assert "seed" not in text


def test_curves_over_steps_seconds_and_tokens(runs: list[Path], tmp_path: Path) -> None:
    page = compare.write_comparison(runs, tmp_path / "page.html").read_text()
    found = re.search(r'<script type="application/json" id="axes">(.*?)</script>', page, re.S)
    axes = json.loads(found[1])
    assert axes == {  # of accuracy and of reward, of each run
        "step": [[[0, 2], [0, 2]], [[1, 2], [1, 2]]],
        "seconds": [[[10, 20], [20, 40]], [[14, 20], [28, 40]]],
        "sampled tokens": [[[0, 150], [0, 150]], [[100, 150], [100, 150]]],
        "FLOP": [[[None, 9], [None, 9]], [[7, 9], [7, 9]]],
    }


def test_what_a_run_lacks_is_said(runs: list[Path], tmp_path: Path, capsys, monkeypatch) -> None:
    bare = [{k: v for k, v in row.items() if k != "rollout/sampled_tokens"} for row in ROWS]
    old = write(tmp_path / "old", 'name = "one"\n', bare)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs[0]), str(old)]) == 0
    page = (tmp_path / "comparison.html").read_text()
    assert f"{old}: rollout/sampled_tokens was not recorded" in page  # two runs of one name go by their paths
    assert main(["report", str(runs[0]), str(tmp_path / "absent")]) == 2
    assert "There is no run directory" in capsys.readouterr().err
    assert main(["report", str(runs[0]), "--out", "x.html"]) == 2
    assert "--out is for the page on several" in capsys.readouterr().err


def test_the_same_settings_are_none_that_differ() -> None:
    config = {"name": "x", "trainer": {"lr": 1e-6, "steps": 3}, "data": {"tasks": [{"name": "a"}]}}
    assert compare.differing([config, config | {"name": "y"}]) == []
    other = config | {"trainer": {"lr": 2e-6, "steps": 3}}
    assert compare.differing([config, other]) == [("trainer.lr", ["1e-06", "2e-06"])]


def test_a_run_of_no_rows_is_no_obstacle(tmp_path: Path) -> None:
    run = compare.Named("x", RunData(tmp_path, {}, "", [], []), "#000")
    assert compare._table([run], compare.VALUES) == []
    assert compare._times([run]) == []
    assert all(compare._figure(curve, [run]) is None for curve in compare._curves())
