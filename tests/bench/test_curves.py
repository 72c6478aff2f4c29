"""`rolltree bench curves`: whole runs of recipes, what is counted in them, and their comparison at equal cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rolltree.bench.cli import main
from rolltree.bench.jobs import curves, curves_table, tuning
from rolltree.bench.jobs.job import Point
from rolltree.bench.schema import read
from rolltree.engine.app.config import load_config
from rolltree.engine.errors import RunError
from rolltree.engine.learn.learner import Learner
from rolltree.engine.loop.evaluation import Evaluation

from ..support.tiny import GIVEN, NO_METHOD, write_job

POINT = Point("sums, seed 0", "grpo", 0, 0.0, 0, 0.25, 512, "a cpu", {"torch": "2"}, "abc", "now")


def points(provider: str, seed: int, *readings: tuple[float, int, float]) -> list[Point]:
    return [
        replace(POINT, case=f"sums, seed {seed}", provider=provider, step=k, seconds=s, tokens=t, accuracy=a)
        for k, (s, t, a) in enumerate([(0.0, 0, 0.25), *readings])
    ]


GRPO = points("grpo", 0, (2.0, 100, 0.35), (4.0, 200, 0.55))
GRPO_1 = points("grpo", 1, (2.0, 110, 0.45), (5.0, 210, 0.65))
RAFT = points("raft", 0, (1.0, 150, 0.5), (3.0, 300, 0.9))
RAFT_1 = points("raft", 1, (1.5, 140, 0.3), (3.2, 280, 0.4))


def test_recipes_are_compared_at_the_most_tokens_and_seconds_that_all_runs_reached() -> None:
    """At 200 tokens and 3.0 seconds, and a quarter of them; each figure by NumPy's interpolation."""
    page = curves_table.markdown([*RAFT_1, *GRPO, *RAFT, *GRPO_1])
    lines = page.splitlines()
    heads = [f"{x} | against grpo" for x in ("0.05 k tokens", "0.2 k tokens", "0.75 s", "3 s")]
    assert lines[0] == f"| sums | seeds | {' | '.join(heads)} |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| grpo", "| raft"]  # 32 and 30 % at 50 tokens

    def by_numpy(runs: list[list[Point]], axis: str, x: float) -> list[float]:
        return [100 * float(np.interp(x, [getattr(p, axis) for p in run], [p.accuracy for p in run])) for run in runs]

    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:]] for line in lines[2:4]}
    assert [line.split("|")[2].strip() for line in lines[2:4]] == ["2", "2"]
    costs = (("tokens", 50.0), ("tokens", 200.0), ("seconds", 0.75), ("seconds", 3.0))
    for name, runs in (("raft", [RAFT, RAFT_1]), ("grpo", [GRPO, GRPO_1])):
        wanted = [by_numpy(runs, axis, x) for axis, x in costs]
        assert cells[name][:8:2] == [f"{np.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in wanted]
    assert cells["grpo"][1:8:2] == [""] * 4
    gaps = np.subtract(by_numpy([RAFT, RAFT_1], "seconds", 3), by_numpy([GRPO, GRPO_1], "seconds", 3))
    assert cells["raft"][7] == f"{gaps.mean():+.1f} ({gaps.min():+.1f} to {gaps.max():+.1f})"
    assert "25.0 before training" in page
    with pytest.raises(ValueError, match=r"grpo ended after 4 seconds, before 4\.5"):
        curves_table.accuracy_at(GRPO, "seconds", 4.5)


def test_recipes_are_compared_where_they_reach_a_target() -> None:
    """By linear interpolation between two readings, for the runs that reach it; those without FLOP have no table."""
    tuned = [replace(p, flop=1e9 * p.step) for p in points("grpo_tuned", 0, (2.0, 100, 0.45), (4.0, 200, 0.65))]
    other = [replace(p, flop=1e9 * p.step) for p in points("efficient", 0, (1.0, 100, 0.65), (2.0, 150, 0.78))]
    low = [replace(p, flop=1e9 * p.step) for p in points("efficient", 1, (1.0, 100, 0.3), (2.0, 150, 0.4))]
    assert curves_table.targets(GRPO) == ""
    head, _, of_tuned, of_other = curves_table.targets([*tuned, *other, *low, *GRPO]).splitlines()
    assert head.startswith("| sums | seeds | GFLOP to 50 % | against grpo_tuned | seconds | against grpo_tuned |")
    assert of_tuned.startswith("| grpo_tuned | 1 | 1.2 |  | 2.5 |  | not reached |  | not reached |  |")
    # 0.25 of 0.4 is 0.625 of a step, and 0.75 lies 10 / 13 of the second step on
    assert of_other.startswith(
        "| efficient | 2 | 0.6, 1 of 2 | 0.50 | 0.6, 1 of 2 | 0.25 | 1.8, 1 of 2 |  | 1.8, 1 of 2 |"
    )


def test_distillation_is_compared_by_tokens() -> None:
    """A campaign with `opd` has a table of its own, and none of FLOP."""
    tokens = [replace(p, flop=1e9, targets=(0.5,)) for p in points("opd", 0, (2.0, 100, 0.45), (4.0, 200, 0.55))]
    whole = [replace(p, flop=1e9, targets=(0.5,)) for p in points("gkd", 0, (1.0, 60, 0.4), (2.0, 100, 0.6))]
    assert curves_table.targets([*tokens, *whole]) == ""
    assert curves_table.distilled(GRPO) == ""
    head, _, of_tokens, of_whole = curves_table.distilled([*tokens, *whole]).splitlines()
    assert head == "| sums | seeds | thousand tokens to 50 % | against opd | last 5 evaluations |"
    mean = np.mean([100 * p.accuracy for p in tokens])
    assert of_tokens == f"| opd | 1 | 0.1 |  | {mean:.1f} % |"  # 150 tokens
    assert of_whole.startswith("| gkd | 1 | 0.1 | 0.53 | ")  # 80


@pytest.mark.slow
def test_tokens_of_demonstrations_are_counted(tmp_path: Path) -> None:
    """Responses that are imitated cost their tokens, with the one that ends each; seconds begin with the training."""
    toml = write_job(tmp_path, {"given.jsonl": GIVEN}, **NO_METHOD)
    texts = f"--demonstrations={{path='{tmp_path}/given.jsonl',per_step=3}}"
    keys = ["--recipe=sft", texts, "--evaluation.every=1"]
    config = load_config(toml, [*keys, "--trainer.steps=2", "--trainer.prompts_per_step=0"])
    readings, _ = curves.train(config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (length,) = {len(tokenizer.encode(row["response"])) + 1 for row in GIVEN}
    assert [reading.tokens for reading in readings] == [0, 3 * length, 6 * length]
    assert 0 < readings[1].seconds < readings[2].seconds


@pytest.mark.slow
def test_a_campaign_counts_training_alone_and_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recipes, one seed, two steps. By the processor's clock an update takes 7 s, an evaluation 1000 s."""
    pytest.importorskip("reasoning_gym", reason="the task's problems: pip install rolltree[tasks]")
    toml, out, kept = write_job(tmp_path, **NO_METHOD), tmp_path / "out", {}
    train, evaluate, update, spent = curves.train, Evaluation.run, Learner.update, [0.0]

    def keeping(config: Any, **_: Any) -> Any:
        found = train(config)
        lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
        kept[Path(config.output_dir).name] = [json.loads(line) for line in lines]
        return found

    def spending(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def spend(*args: Any) -> Any:
            spent[0] += seconds
            return call(*args)

        return spend

    monkeypatch.setattr(curves, "train", keeping)
    monkeypatch.setattr(curves, "_warm_up", lambda config: None)
    monkeypatch.setattr(curves, "time", SimpleNamespace(process_time=lambda: spent[0], perf_counter=time.perf_counter))
    monkeypatch.setattr(Evaluation, "run", spending(1000, evaluate))
    monkeypatch.setattr(Learner, "update", spending(7, update))
    command = ["curves", str(toml), "--seeds", "3", "--trainer.steps", "2", "--evaluation.every", "1"]
    command += ["--out", str(out)]
    assert main([*command, "--recipes", "grpo", "--within", "-1"]) == 0
    assert "Not run yet: 1." in capsys.readouterr().out
    assert main([*command, "--recipes", "grpo"]) == 0
    assert main([*command, "--recipes", "grpo", "raft"]) == 0
    assert list(kept) == ["grpo-3", "raft-3"], "each ran once"
    found = [Point(**json.loads(line)) for line in (out / curves.CURVES).read_text().splitlines()]
    assert [(p.provider, p.step, p.seconds, p.case) for p in found] == [
        (name, step, 7 * step, "tiny, seed 3") for name in ("grpo", "raft") for step in range(3)
    ]
    for recipe, points in (("grpo", found[:3]), ("raft", found[3:])):
        metrics = kept[f"{recipe}-3"]
        assert [p.tokens for p in points] == np.cumsum(
            [row.get("rollout/sampled_tokens", 0) for row in metrics]
        ).tolist()
        assert [p.accuracy for p in points] == [row["eval/accuracy"] for row in metrics]
    rows = {(row.provider, row.metric): row.value for row in read(out / "recipes.jsonl")}
    assert rows["grpo", "actor/kl_loss"] == pytest.approx(
        np.median([row["actor/kl_loss"] for row in kept["grpo-3"][1:]])
    )
    assert ("raft", "actor/kl_loss") not in rows
    text = curves_table.actions(read(out / "recipes.jsonl"), ["actor/kl_loss"])
    assert text.splitlines()[2:] == [f"| grpo | {rows['grpo', 'actor/kl_loss']:.3g} |", "| raft |  |"]


def runs_of(*accuracies: tuple[float, ...]) -> list[list[Point]]:
    """One run for each tuple: its accuracies at evaluations a GFLOP apart."""
    return [
        [replace(p, flop=1e9 * p.step) for p in points("grpo", seed, *((i, 10 * i, a) for i, a in enumerate(of_run)))]
        for seed, of_run in enumerate(accuracies)
    ]


@pytest.mark.slow
def test_updates_that_share_no_prefix_learn_the_same_for_more_flop(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the task's problems: pip install rolltree[tasks]")
    toml, runs = write_job(tmp_path, **NO_METHOD), {}
    for flat in (False, True):
        keys = {
            "recipe": "grpo",
            "trainer.steps": "2",
            "evaluation.every": "1",
            "output_dir": str(tmp_path / str(flat)),
        }
        config = load_config(str(toml), [part for key, value in keys.items() for part in (f"--{key}", value)])
        runs[flat] = curves.train(config, flat=flat)
    (of_tree, tree_steps), (of_flat, flat_steps) = runs[False], runs[True]
    assert [(r.tokens, r.accuracy) for r in of_flat] == [(r.tokens, r.accuracy) for r in of_tree]
    assert all(
        f["perf/flop_trained"] > 1.2 * t["perf/flop_trained"] for f, t in zip(flat_steps, tree_steps, strict=True)
    )


def test_settings_are_chosen_by_how_many_runs_reach_the_end_then_by_flop() -> None:
    fast = runs_of((0.1, 0.8, 0.8, 0.8), (0.1, 0.8, 0.9, 0.9))  # one of two reaches 0.85, early
    sure = runs_of((0.1, 0.2, 0.5, 0.9), (0.1, 0.2, 0.5, 0.9))
    slow = runs_of((0.1, 0.2, 0.2, 0.9), (0.1, 0.2, 0.2, 0.9))
    tries = {"grpo": {"slow": slow, "fast": fast, "sure": sure}, "raft": {"slow": slow[:1], "failed": [[]]}}
    assert tuning.choose(tries, [0.5, 0.85]) == {"grpo": "sure", "raft": "slow"}
    assert tuning.choose(tries, [0.5, 0.95])["grpo"] == "fast"  # none reaches the last target
    assert tuning.score(fast, [0.85])[0] == 1


def test_a_grid_is_tried_and_its_best_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger rates end higher here; the reported run has the rate that the tries chose, and the key of the grid."""
    rates: list[tuple[int, float]] = []

    def learn(config: Any, **_: Any) -> Any:
        rates.append((config.seed, config.trainer.lr))
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        end = 0.5 + 1e3 * config.trainer.lr
        return [curves.Reading(0, 0.0, 0, 0.25), curves.Reading(1, 3.0, 50, end)], [{"perf/flop_so_far": 2e9}]

    monkeypatch.setattr(curves, "train", learn)
    toml, out = write_job(tmp_path, **NO_METHOD), tmp_path / "out"
    command = ["curves", str(toml), "--recipes", "grpo", "--out", str(out)]
    trying = [*command, "--seeds", "7", "8", "--tune", "trainer.lr=1e-5,2e-4"]
    assert main(trying) == 2
    assert "no targets to tune for; set evaluation.targets" in capsys.readouterr().err
    assert main([*trying, "--evaluation.targets", "[0.6]", "--evaluation.every", "1"]) == 0
    assert sorted(rates[1:]) == [(7, 1e-5), (7, 2e-4), (8, 1e-5), (8, 2e-4)]
    said = capsys.readouterr().out
    assert "grpo, trainer.lr 1e-5: 0 of 2 reach 60 %\n" in said
    assert "grpo, trainer.lr 2e-4: 2 of 2 reach 60 % after 1.56 GFLOP  <- best" in said
    rates.clear()
    assert main([*command, "--seeds", "3", "--tuned", str(out / "tuned.json")]) == 0
    assert rates[1:] == [(3, 2e-4)]
    for wrong, error in (
        (["--tune", "trainer.lr"], "--tune takes KEY=VALUE,VALUE"),
        (["--tuned", str(tmp_path / "none.json")], "has no settings that --tune has written"),
        (["--recipes", "raft", "--tuned", str(out / "tuned.json")], "has no setting for raft; tune them first"),
    ):
        assert main([*command, *wrong]) == 2
        assert error in capsys.readouterr().err


def test_a_recipe_that_cannot_run_is_recorded_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Any, **_: Any) -> Any:
        if config.recipe == "grpo":
            raise RunError("It broke.")
        return [curves.Reading(0, 0.0, 0, 0.25), curves.Reading(1, 3.0, 50, 0.5)], [
            {"reward/mean": 0.5, "perf/flop_so_far": 7.0}
        ]

    toml = write_job(tmp_path)
    monkeypatch.setattr(curves, "train", fail)
    monkeypatch.setattr(curves, "_warm_up", lambda config: None)
    monkeypatch.setattr(curves.shutil, "rmtree", lambda *_, **__: None)
    assert main(["curves", str(toml), "--seeds", "0", "--recipes", "grpo", "raft", "--out", str(tmp_path)]) == 1
    assert "recipes / tiny, seed 0 / grpo: failed: It broke." in capsys.readouterr().out
    assert [row.provider for row in read(tmp_path / "recipes.jsonl")] == ["raft"]
