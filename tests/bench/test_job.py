"""`rolltree bench job` on a tiny model: what each provider leaves is what the trainers make by themselves."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolltree.bench.cli import main
from rolltree.bench.jobs import job, job_runs
from rolltree.bench.jobs.job import Point
from rolltree.bench.jobs.job_runs import Recorder, weights_of
from rolltree.bench.runner import UnsupportedError
from rolltree.bench.schema import Context, Row, rows_at
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import prepare_model
from rolltree.engine.app.config import load_config
from rolltree.kernels import Objective

from ..support.tiny import tiny_job

pytest.importorskip("reasoning_gym", reason="the job's problems: pip install rolltree[tasks]")

OVERRIDES = ["--algorithm.advantage", "group_norm", "--trainer.steps", "2", "--evaluation.every", "1"]
HAS_PEAKS = Path("/proc/self/clear_refs").exists()


toml = tiny_job()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / job_runs.STEPS).read_text().splitlines()]


def start_of(config: Any) -> dict[str, torch.Tensor]:
    return dict(prepare_model(config)[0].named_parameters())


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.skipif(not HAS_PEAKS, reason="the system hides the peak of a process")
@pytest.mark.parametrize("provider", ["trl", "trl+rolltree", "rolltree_tree", "rolltree_s1"])
def test_every_provider_leaves_its_weights(provider: str, toml: Path, tmp_path: Path) -> None:
    if provider.startswith("trl"):
        pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    config = load_config(toml, OVERRIDES)
    job_runs.PROVIDERS[provider](config, Recorder(tmp_path, config))
    lines = lines_of(tmp_path)
    assert [(line["step"], line["weights"]) for line in lines] == [(1, True), (1, False), (2, True), (2, False)]
    seconds, tokens = ([line[name] for line in lines] for name in ("seconds", "tokens"))
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[2]
    responses = config.trainer.prompts_per_step * config.rollout.n
    most = responses * config.rollout.max_new_tokens
    ahead = 2 * most if provider == "rolltree_s1" else 0  # it samples the next batches already
    assert 0 < tokens[1] <= most + ahead
    assert tokens[1] < tokens[3] <= 2 * most + ahead
    assert all(line["peak_memory_mib"] > 50 for line in lines)
    before = {name: weight.detach().clone() for name, weight in start_of(config).items()}
    for step in (1, 2):
        after = load_file(weights_of(tmp_path, step))
        assert after.keys() == before.keys()
        assert any((after[name] - before[name]).abs().max() > 1e-5 for name in before)
        before = after


@pytest.mark.slow
def test_the_weights_are_those_of_a_run_and_so_is_their_accuracy(toml: Path, tmp_path: Path) -> None:
    """A run of `rolltree train` with the same configuration, which evaluates and exports by itself."""
    config = load_config(toml, [*OVERRIDES, "--rollout.program", "flat", "--rollout.program_options", "{}"])
    job_runs.flat(load_config(toml, OVERRIDES), Recorder(tmp_path, config))
    quiet: Any = job_runs._Steps(Recorder(tmp_path / "none", config))
    quiet.step = lambda *_: None
    summary = build(config.model_copy(update={"output_dir": str(tmp_path)}), console=quiet).run()
    ours, theirs = load_file(weights_of(tmp_path, 2)), load_file(summary.export / "model.safetensors")
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    accuracies = list(job.accuracies(config, [None, weights_of(tmp_path, 2)]))
    assert accuracies == [summary.accuracy_before, summary.accuracy_after]


@pytest.mark.slow
def test_the_command(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points, rows, and nothing twice; one that is absent, and one that is too slow. The job runs in this process."""

    def here(config: Any, provider: str, directory: Path, limit: float) -> None:
        job_runs.PROVIDERS[provider](config, Recorder(directory, config))

    out = tmp_path / "out"
    command = ["job", str(toml), *OVERRIDES, "--out", str(out), "--providers"]
    with monkeypatch.context() as patched:
        patched.setattr(job, "_process", here)
        assert main([*command, "vllm|flat"]) == 0
    points = [job.Point(**json.loads(line)) for line in (out / "job.curves.jsonl").read_text().splitlines()]
    assert [(p.provider, p.step) for p in points] == [("rolltree_flat", step) for step in (0, 1, 2)]
    assert all(0 <= p.accuracy <= 1 and p.problems == 8 for p in points)
    rows = rows_at(out)
    found = [(row.direction, row.metric) for row in rows]
    assert found == [("step", "time_ms"), *(("job", name) for name in ("time_ms", "peak_memory_mib", "accuracy"))]
    assert rows[1].value == pytest.approx(1e3 * points[-1].seconds)
    assert rows[3].value == points[-1].accuracy
    said = capsys.readouterr().out
    assert "trl+vllm does not run: vllm is not installed" in said
    assert main([*command, "vllm|flat"]) == 0
    assert "step 1" not in capsys.readouterr().out, "it ran again"
    assert main([*command, "tree", "--limit", "0.4"]) == 1
    assert "rolltree_tree: stopped: it took longer than 0.4 s" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_in_processes_of_their_own(toml: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    command = ["job", str(toml), *OVERRIDES, "--out", str(tmp_path / "out")]
    assert main(command) == 0
    rows = rows_at(tmp_path / "out")
    assert {row.provider for row in rows} == set(job.PROVIDERS) - {"trl+vllm"}
    assert {row.provider for row in rows if row.metric == "speedup"} == set(job.PROVIDERS) - {"trl+vllm", "trl"}
    assert all(row.value > 100 for row in rows if row.metric == "peak_memory_mib")
    steps = {row.provider: row.value for row in rows if (row.direction, row.metric) == ("step", "time_ms")}
    for row in rows:
        assert row.metric != "speedup" or row.value == pytest.approx(steps["trl"] / steps[row.provider])
    status, why = job._process(load_config(toml, OVERRIDES), "nobody", tmp_path, 100) or ("", "")
    assert status == "failed"
    assert why.startswith("KeyError: 'nobody' (exit status 1; ")


def test_speedups_are_over_the_last_times_of_the_same_case() -> None:
    def row(case: str, provider: str, direction: str, value: float) -> Row:
        return Row("job", case, provider, direction, "time_ms", value, value, value, None, "cpu", {}, "commit", "time")

    recorded = [row("a", job.BASE, "step", 3.0), row("a", job.BASE, "step", 2.0), row("b", job.BASE, "job", 80.0)]
    recorded.append(row("a", job.BASE, "to 50 %", 9.0))
    mine = [row("a", "rolltree_flat", direction, 1.0) for direction in ("step", "job", "to 50 %", "to 60 %")]
    over = [(row.direction, row.metric, row.value) for row in job.speedups(mine, recorded)]
    assert over == [("step", "speedup", 2.0), ("to 50 %", "speedup", 9.0)]
    assert not list(job.speedups(recorded, recorded))


def test_the_time_to_a_target_is_recorded_where_it_is_reached() -> None:
    context = Context("cpu", {}, "commit", "time")
    points = [
        replace(Point("a", "p", i, 10.0 * i, 0, accuracy, 100, **asdict(context)), targets=(0.5, 0.8))
        for i, accuracy in enumerate((0.2, 0.4, 0.6))
    ]
    lines = [{"seconds": 10.0 * i, "weights": False, "peak_memory_mib": 7.0} for i in (1, 2)]
    rows = {(r.direction, r.metric): r.value for r in job._rows("a", "p", lines, points, context)}
    assert rows["to 50 %", "time_ms"] == pytest.approx(15e3)
    assert ("to 80 %", "time_ms") not in rows


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("algorithm.advantage", "rloo", "algorithm.advantage"),
        ("algorithm.objective", "gspo", "loss is"),
        ("algorithm.objective", "cispo", "algorithm.objective"),
        ("trainer.updates_per_step", "2", "trainer.updates_per_step"),
        ("trainer.epochs", "2", "trainer.epochs"),
        ("loop.staleness", "1", "[loop]"),
        ("rollout.stop", '["x"]', "rollout.stop"),
    ],
)
def test_what_trl_has_no_option_for_is_refused(key: str, value: str, named: str, toml: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    config = load_config(toml, [*OVERRIDES, f"--{key}", value])
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        job_runs.trl(config, Recorder(tmp_path, config))


def test_trl_with_vllm_needs_a_gpu(toml: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    config = load_config(toml, [*OVERRIDES, "--model.device", "cpu"])
    with pytest.raises(UnsupportedError, match=r"on a CPU vLLM packs its weights .* it needs a GPU"):
        job_runs.PROVIDERS["trl+vllm"](config, Recorder(tmp_path, config))


def test_micro_batches_of_trl_are_whole_groups(toml: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    config = load_config(toml, OVERRIDES)  # 6 prompts of 4 responses, 256 tokens a micro-batch
    for longest, groups in ((10, 6), (20, 3), (33, 1), (1000, 1)):
        given = job_runs.grpo_arguments(config, Objective.preset("dapo"), longest, str(tmp_path), vllm=False)
        assert given.per_device_train_batch_size == groups * 4
        assert given.gradient_accumulation_steps * groups == 6


def test_mistakes_are_told(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err
    assert main(["job", str(toml), "--evaluation.problems", "0", "--every", "0"]) == 2
    assert "set evaluation.problems" in capsys.readouterr().err
    assert main(["job", str(toml), "--providers", "("]) == 2
    assert "regular expression" in capsys.readouterr().err
    assert main(["job", str(toml), "--list"]) == 0
    assert capsys.readouterr().out.split() == list(job.PROVIDERS) == list(job_runs.PROVIDERS)
