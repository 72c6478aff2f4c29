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
import torch

from rolltree.engine.app.cli import main
from rolltree.engine.record.metrics import TIMED_PARTS

from ...support.forks import Forks
from ...support.processes import Process
from ...support.tiny import ROOT, write_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run: its configuration and its directory."""
    toml = write_run(tmp_path_factory.mktemp("run"))
    assert main(["train", str(toml)]) == 0
    return toml, toml.parent / "runs" / "tiny"


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def comparable(directory: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows(directory)]


@pytest.mark.check
def test_a_run_leaves_what_the_readme_says(finished):
    _, directory = finished
    metrics = rows(directory)
    assert [row["step"] for row in metrics] == list(range(7))
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [0, 3, 6]
    for row in metrics[1:]:
        parts = sum(v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step")
        assert parts == pytest.approx(row["timing_s/step"], abs=1e-6)
        assert row["training/rollout_probs_diff_mean"] < 1e-5  # sampler and trainer are one module
        assert row["tree/token_ratio"] > 1
    assert any(row.get("actor/grad_norm", 0) > 0 for row in metrics), "no update happened; the test shows nothing"
    assert len(list((directory / "rollouts").glob("*.parquet"))) == 6
    assert pq.read_table(directory / "rollouts" / "step_000001.parquet").num_rows == 24
    assert (directory / "report.html").stat().st_size > 10_000
    assert (directory / "config.toml").exists()


def documented_metrics() -> list[str]:
    """The names of docs/metrics.md, as patterns: `<kind>` stands for any one word."""
    names = re.findall(r"`([\w<>]+(?:/[\w<>]+)+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    return [re.sub(r"<\w+>", r"[\\w-]+", name) for name in names]


def test_the_page_of_the_metrics_has_what_a_run_writes(finished):
    _, directory = finished
    page = re.compile("|".join(documented_metrics()))
    written = {name for row in rows(directory) for name in row} - {"step"}
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


@pytest.mark.check
def test_plain_transformers_loads_the_export(finished, torch_forks: Forks):
    _, directory = finished
    program = (
        "import sys\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"path = {str(directory / 'export')!r}\n"
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
def test_killed_and_resumed_equals_uninterrupted(finished, server, tmp_path, rows_before_the_kill):
    toml, directory = finished
    command, killed = ["train", str(toml), "--output_dir", str(tmp_path)], tmp_path / "tiny"
    process = Process(server, command)
    process.await_row(killed / "metrics.jsonl", rows_before_the_kill)
    assert not process.ended(), "the run ended before it was killed; the test shows nothing"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert Process(server, [*command, "--resume"]).wait() == 0
    assert comparable(killed) == comparable(directory)
    ours, theirs = weights(killed), weights(directory)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "export" / "model.safetensors")


@pytest.mark.check
def test_more_steps_after_the_end(finished, tmp_path):
    """--resume with a larger trainer.steps goes on from the last checkpoint."""
    toml, directory = finished
    shutil.copytree(directory, tmp_path / "tiny")
    assert main(["train", str(toml), "--output_dir", str(tmp_path), "--resume", "--trainer.steps", "7"]) == 0
    assert comparable(tmp_path / "tiny")[:7] == comparable(directory)
    assert rows(tmp_path / "tiny")[-1]["step"] == 7


# -- mistakes ----------------------------------------------------------------------------------------------------------


def corrupt_checkpoint(toml: Path) -> list[str]:
    newest = max((toml.parent / "runs" / "tiny" / "checkpoints").glob("step_*"))
    (file,) = newest.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return ["--resume"]


def pickled_model(toml: Path) -> list[str]:
    model = toml.parent / "model"
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return ["--name", "other"]


def prompts_without_the_column(toml: Path) -> list[str]:
    (toml.parent / "p.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return ["--name", "other", "--data.tasks", "[]", "--data.path", str(toml.parent / "p.jsonl")]


MISTAKES = {
    "another run": (lambda toml: [], 2, "already holds a run"),
    "unknown key": (lambda toml: ["--trainer.learning_rate", "1"], 2, "trainer.learning_rate"),
    "no model": (lambda toml: ["--name", "other", "--model.path", "./nowhere"], 2, "'nowhere' does not exist"),
    "pickled model": (pickled_model, 2, "never loaded"),
    "no column": (prompts_without_the_column, 2, "no column 'prompt'"),
    "long prompt": (lambda toml: ["--name", "other", "--data.max_prompt_tokens", "3"], 2, "data.max_prompt_tokens"),
    "no responses": (lambda toml: ["--name", "other", "--rollout.n", "0"], 2, "rollout.n"),
    "no such objective": (lambda toml: ["--name", "other", "--algorithm.objective", "gpro"], 2, "gpro"),
    "nothing to resume": (lambda toml: ["--name", "other", "--resume"], 2, "resume"),
    "corrupt checkpoint": (corrupt_checkpoint, 2, ".safetensors"),
    "changed setting": (lambda toml: ["--resume", "--trainer.lr", "0.5"], 2, "trainer.lr"),
    "raising reward": (lambda toml: ["--name", "other", "--reward.on_failure", "raise"], 1, "verifier failed"),
}


@pytest.mark.check(but=5)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence_and_change_nothing(name, finished, tmp_path, capsys):
    toml, _ = finished
    shutil.copytree(toml.parent, tmp_path / "copy")
    toml = tmp_path / "copy" / "tiny.toml"
    toml.write_text(toml.read_text().replace(str(finished[0].parent), str(tmp_path / "copy")))
    arguments, code, says = MISTAKES[name]
    given = arguments(toml)
    if name == "changed setting":  # the copy's paths have changed too, and they are named first
        original = finished[0].parent
        given += ["--model.path", str(original / "model"), "--reward.verifier", f"{original / 'reward.py'}:judge"]
    if name == "raising reward":
        (toml.parent / "reward.py").write_text("def judge(text, entry):\n    raise RuntimeError('no')\n")
    before = {p: p.read_bytes() for p in (toml.parent / "runs").rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(["train", str(toml), *given]) == code
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error
    assert "Traceback" not in error
    after = {p: p.read_bytes() for p in (toml.parent / "runs").rglob("*") if p.is_file() and "/other/" not in str(p)}
    assert after == before
    if code == 2:
        assert not (toml.parent / "runs" / "other").exists()


@pytest.mark.check
def test_hanging_rewards_are_dropped_and_counted(finished, tmp_path):
    toml, _ = finished
    shutil.copytree(toml.parent / "model", tmp_path / "model")
    text = toml.read_text().replace(str(toml.parent), str(tmp_path))
    (tmp_path / "tiny.toml").write_text(text)
    (tmp_path / "reward.py").write_text(
        "import time\n"
        "def judge(text, entry):\n"
        "    if len(text) % 5 == 1:\n"
        "        time.sleep(60)\n"
        "    return float(len(text) % 2)\n"
    )
    arguments = ["--trainer.steps", "1", "--reward.timeout_s", "0.3", "--evaluation.problems", "0"]
    assert main(["train", str(tmp_path / "tiny.toml"), *arguments, "--evaluation.every", "0"]) == 0
    last = rows(tmp_path / "runs" / "tiny")[-1]
    assert last["reward/failed_timeout"] > 0


def test_dry_run_writes_nothing(finished, tmp_path, capsys):
    toml, _ = finished
    assert main(["train", str(toml), "--dry-run", "--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "# plan" in out
    assert "parameters" in out
    assert not (tmp_path / "out").exists()


def test_rollout_shows_what_the_first_step_samples(finished, tmp_path, capsys):
    toml, directory = finished
    assert main(["rollout", str(toml), "--prompts", "6", "--out", str(tmp_path / "shown.parquet")]) == 0
    assert capsys.readouterr().out.count("unique tokens") == 6
    shown, trained = (
        pq.read_table(file).drop(["step", "advantage"])
        for file in (tmp_path / "shown.parquet", directory / "rollouts" / "step_000001.parquet")
    )
    assert shown.num_rows == 24
    assert shown.equals(trained)


def test_report_and_methods(finished, capsys):
    _, directory = finished
    assert main(["report", str(directory)]) == 0
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
