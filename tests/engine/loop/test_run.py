"""Whole runs through the command line: what they leave, kill -9 and resume, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolltree.engine import load_config
from rolltree.engine.app.cli import main
from rolltree.engine.record.metrics import TIMED_PARTS

from ...support.forks import Forks
from ...support.processes import Process
from ...support.resumed import assert_same_run
from ...support.tiny import ROOT, write_job


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.check
def test_a_run_leaves_what_the_readme_says(finished_run):
    metrics = rows(finished_run)
    assert [row["step"] for row in metrics] == list(range(7))
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [0, 3, 6]
    for row in metrics[1:]:
        parts = sum(v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step")
        assert parts == pytest.approx(row["timing_s/step"], abs=1e-6)
        assert row["training/rollout_probs_diff_mean"] < 1e-5  # sampler and trainer are one module
        assert row["tree/token_ratio"] > 1
    assert any(row.get("actor/grad_norm", 0) > 0 for row in metrics), "no update happened; the test shows nothing"
    assert len(list((finished_run / "rollouts").glob("*.parquet"))) == 6
    assert pq.read_table(finished_run / "rollouts" / "step_000001.parquet").num_rows == 24
    assert (finished_run / "report.html").stat().st_size > 10_000
    assert (finished_run / "config.toml").exists()


def documented_metrics() -> list[str]:
    """The names of docs/metrics.md, as patterns: `<kind>` stands for any one word."""
    names = re.findall(r"`([\w<>]+(?:/[\w<>]+)+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    return [re.sub(r"<\w+>", r"[\\w-]+", name) for name in names]


def test_the_page_of_the_metrics_has_what_a_run_writes(finished_run):
    page = re.compile("|".join(documented_metrics()))
    written = {name for row in rows(finished_run) for name in row} - {"step"}
    assert len(written) > 30
    assert {name for name in written if not page.fullmatch(name)} == set()


def test_the_page_of_the_metrics_has_what_the_code_names():
    """The page also has the metrics of some runs only: critic, reference, failures, late rollouts, several terms."""
    page = re.compile("|".join(documented_metrics()))
    text = "\n".join(
        file.read_text(encoding="utf-8") for part in ("engine", "kernels") for file in (ROOT / part).rglob("*.py")
    )
    recorded = re.findall(r"sums\.\w+\(\s*f?\"([^\"]+)\"", text) + re.findall(
        r"\"((?:actor|training|critic)/\w+)\"", text
    )
    recorded += re.findall(r"\"((?:eval|perf|timing_s)/[\w/]+)\"", text) + [f"timing_s/{part}" for part in TIMED_PARTS]
    given = {"self.name": "reward", "what": "skipped"}  # of the names in braces; any word stands for the others
    names = {re.sub(r"\{([^}]*)\}", lambda found: given.get(found[1], "x"), name) for name in recorded}
    assert len(names) > 50
    assert {name for name in names if not page.fullmatch(name)} == set()


@pytest.mark.slow
def test_plain_transformers_loads_the_export(finished_run, torch_forks: Forks):
    program = (
        "import sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"path = {str(finished_run / 'export')!r}\n"
        "m, t = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)\n"
        "assert 'rolltree' not in sys.modules and m.config._attn_implementation == 'sdpa'\n"
        "ids = t('1 + 2 =', return_tensors='pt').input_ids\n"
        "assert m.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]\n"
    )
    code, said = torch_forks.run(program, directory=Path("/"))
    assert code == 0, said


@pytest.mark.check
@pytest.mark.parametrize(
    "rows_before_the_kill", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(6, marks=pytest.mark.slow)]
)
def test_killed_and_resumed_equals_uninterrupted(finished_run, server, tmp_path, rows_before_the_kill):
    killed = tmp_path / "killed" / "tiny"
    command = ["train", str(finished_run / "config.toml"), "--output_dir", str(killed.parent)]
    process = Process(server, command)
    process.await_row(killed / "metrics.jsonl", rows_before_the_kill)
    assert not process.ended(), "the run ended before it was killed; the test shows nothing"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert Process(server, [*command, "--resume"]).wait() == 0
    assert_same_run(killed, finished_run)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def corrupt_checkpoint(run: Path) -> list[str]:
    (file,) = max((run / "checkpoints").glob("step_*")).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return ["--resume"]


def pickled_model(run: Path) -> list[str]:
    model = run.parent / "model"
    shutil.copytree(load_config(run / "config.toml").model.path, model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return ["--name", "other", "--model.path", str(model)]


def prompts_without_the_column(run: Path) -> list[str]:
    (run.parent / "p.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return ["--name", "other", "--data.tasks", "[]", "--data.path", str(run.parent / "p.jsonl")]


def raising_reward(run: Path) -> list[str]:
    (run.parent / "reward.py").write_text("def judge(text, entry):\n    raise RuntimeError('no')\n")
    judge = f"{run.parent}/reward.py:judge"
    return ["--name", "other", "--reward.verifier", judge, "--reward.on_failure", "raise"]


MISTAKES = {
    "another run": (lambda run: [], 2, "already holds a run"),
    "unknown key": (lambda run: ["--trainer.learning_rate", "1"], 2, "trainer.learning_rate"),
    "no model": (lambda run: ["--name", "other", "--model.path", "./nowhere"], 2, "'nowhere' does not exist"),
    "pickled model": (pickled_model, 2, "never loaded"),
    "no column": (prompts_without_the_column, 2, "no column 'prompt'"),
    "long prompt": (lambda run: ["--name", "other", "--data.max_prompt_tokens", "3"], 2, "data.max_prompt_tokens"),
    "no responses": (lambda run: ["--name", "other", "--rollout.n", "0"], 2, "rollout.n"),
    "no such objective": (lambda run: ["--name", "other", "--algorithm.objective", "gpro"], 2, "gpro"),
    "nothing to resume": (lambda run: ["--name", "other", "--resume"], 2, "resume"),
    "corrupt checkpoint": (corrupt_checkpoint, 2, ".safetensors"),
    "changed setting": (lambda run: ["--resume", "--trainer.lr", "0.5"], 2, "trainer.lr"),
    "raising reward": (raising_reward, 1, "verifier failed"),
}


@pytest.mark.check(but=5)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence_and_change_nothing(name, finished_run, capsys):
    arguments, code, says = MISTAKES[name]
    given = ["train", str(finished_run / "config.toml"), "--output_dir", str(finished_run.parent)]
    given += arguments(finished_run)
    before = {p: p.read_bytes() for p in finished_run.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(given) == code
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error
    assert "Traceback" not in error
    assert {p: p.read_bytes() for p in finished_run.rglob("*") if p.is_file()} == before
    if code == 2:
        assert not (finished_run.parent / "other").exists()


@pytest.mark.check
def test_hanging_rewards_are_dropped_and_counted(tmp_path):
    hangs = """
import time
def judge(text, entry):
    if len(text) % 5 == 1:
        time.sleep(60)
    return float(len(text) % 2)
"""
    toml = write_job(tmp_path, {"reward.py": hangs})
    arguments = ["--trainer.steps", "1", "--reward.timeout_s", "0.3", "--evaluation.problems", "0"]
    assert main(["train", str(toml), *arguments, "--evaluation.every", "0"]) == 0
    last = rows(tmp_path / "runs" / "tiny")[-1]
    assert last["reward/failed_timeout"] > 0


def test_dry_run_writes_nothing(toml, tmp_path, capsys):
    assert main(["train", str(toml), "--dry-run", "--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "# plan" in out
    assert "parameters" in out
    assert not (tmp_path / "out").exists()


def test_rollout_shows_what_the_first_step_samples(finished_run, tmp_path, capsys):
    config, shown = str(finished_run / "config.toml"), tmp_path / "shown.parquet"
    assert main(["rollout", config, "--prompts", "6", "--out", str(shown)]) == 0
    assert capsys.readouterr().out.count("unique tokens") == 6
    sampled, trained = (
        pq.read_table(file).drop(["step", "advantage"])
        for file in (shown, finished_run / "rollouts" / "step_000001.parquet")
    )
    assert sampled.num_rows == 24
    assert sampled.equals(trained)


def test_report_and_methods(finished_run, capsys):
    assert main(["report", str(finished_run)]) == 0
    capsys.readouterr()
    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert "tree_path_mean" in listed
    assert "[tool, initial=8, beam=2" in listed
    assert "gspo                  ppo, sequence ratio, seq_mean_token_mean; inferred: eps_low, eps_high" in listed
    heads = (
        "recipes", "objectives", "advantages", "shaping", "schedules", "selections", "losses", "pairs", "curricula",
        "group", "rollout", "verifiers", "other names",
    )  # fmt: skip
    assert all(line.startswith((" ", *heads)) for line in listed.splitlines())
