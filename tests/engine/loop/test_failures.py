"""Responses that cannot be sampled or judged: counted, told, never rewarded, and the end of a run of nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console as RichConsole

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError
from rolltree.engine.loop.orchestrator import RunSummary

from ...support.tiny import write_job

SHORT = ["--trainer.steps=3", "--evaluation.problems=0", "--evaluation.every=0", "--trainer.prompts_per_step=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    write_job(directory)
    return directory


class Run:
    """A run in ``directory`` with what it printed."""

    def __init__(self, home: Path, directory: Path, *overrides: str, verifier: str | None = None) -> None:
        given = [f"--output_dir={directory}/runs", *SHORT, *overrides]
        if verifier is not None:
            (directory / "mine.py").write_text(verifier)
            given += ["--reward.verifier", f"{directory}/mine.py:judge"]
        self.config = load_config(home / "tiny.toml", given)
        self.out = io.StringIO()
        self.loop = build(self.config, console=Console(RichConsole(file=self.out, width=200)))

    def run(self) -> RunSummary:
        return self.loop.run()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.config.run_dir / "metrics.jsonl").read_text().splitlines()]


FAILS = "def judge(text, entry):\n    raise ZeroDivisionError('no')\n"
SOME = "def judge(text, entry):\n    if len(text) % 2:\n        raise ZeroDivisionError('odd')\n    return 1e39\n"
MOST = "def judge(text, entry):\n    return 1e39 if len(text) % 2 else float(len(text) % 3)\n"


@pytest.mark.check(but=1)
@pytest.mark.parametrize("on_failure", ["drop", "zero"])
def test_a_run_without_verdicts_stops(home: Path, tmp_path: Path, on_failure: str) -> None:
    options = ["--reward.max_failed_steps=2", f"--reward.on_failure={on_failure}"]
    run = Run(home, tmp_path, *options, verifier=FAILS)
    says = (
        r"All responses could not be judged for 2 steps in a row \(reward.max_failed_steps\), the last with '.*line 2"
    )
    with pytest.raises(RunError, match=says):
        run.run()
    assert run.loop.step == 1
    assert run.rows[-1]["reward/failed_raised"] == run.rows[-1]["reward/failed"] == 8
    assert "8 of 8 responses could not be judged: ZeroDivisionError: no (line 2 of 'mine.py')." in run.out.getvalue()
    assert "8 UNJUDGED" in run.out.getvalue()


def test_every_kind_of_failure_is_told_once_and_summed(home: Path, tmp_path: Path) -> None:
    run = Run(home, tmp_path, "--reward.max_failed_steps=9", verifier=SOME)
    (line,) = run.run().failures
    assert line.startswith("24 of 24 responses could not be judged: ")
    assert "ZeroDivisionError: odd (line 3 of 'mine.py')" in line
    assert "the verifier returned 1e+39, which is not finite in fp32" in line
    rows = run.rows[1:]
    for row in rows:
        assert row["reward/failed"] == row.get("reward/failed_raised", 0) + row.get("reward/failed_not_finite", 0) == 8
    assert run.out.getvalue().count("which is not finite in fp32.") == 1


def test_a_reward_outside_fp32_is_no_reward(home: Path, tmp_path: Path) -> None:
    run = Run(home, tmp_path, verifier=MOST)
    run.run()
    leaves = [x for p in sorted((run.config.run_dir / "rollouts").iterdir()) for x in pq.read_table(p).to_pylist()]
    odd = [leaf for leaf in leaves if len(leaf["response_text"]) % 2]
    assert 0 < len(odd) < len(leaves)
    assert all((leaf["reward"], leaf["status"]) == (None, "failed") for leaf in odd)
    assert sum(row["reward/failed_not_finite"] for row in run.rows[1:] if "reward/failed_not_finite" in row) == len(odd)
    assert all(row.get("actor/skipped_updates", 0) == 0 for row in run.rows[1:])


def test_weights_that_are_not_finite_stop_the_run(home: Path, tmp_path: Path) -> None:
    run = Run(home, tmp_path, "--trainer.max_bad_steps=2")
    with torch.no_grad():
        run.loop.learner.model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(RunError, match=r"could not be sampled for 2 steps .*trainer.max_bad_steps.*not finite"):
        run.run()
    (_, row) = run.rows
    assert row["rollout/failed"] == row["rollout/failed_not_finite"] == 8
    assert "reward/mean" not in row
    assert "8 UNSAMPLED" in run.out.getvalue()
    (file,) = (run.config.run_dir / "rollouts").iterdir()
    assert {(leaf["status"], leaf["reward"]) for leaf in pq.read_table(file).to_pylist()} == {("failed", None)}


@pytest.mark.check
def test_counts_survive_a_resume(home: Path, tmp_path: Path) -> None:
    """Two failed steps before the end and one after make three in a row."""
    options = ["--reward.max_failed_steps=3", "--trainer.steps=2"]
    Run(home, tmp_path, *options, verifier=FAILS).run()
    arguments = [*SHORT, "--trainer.steps=4", f"--output_dir={tmp_path}/runs", "--reward.max_failed_steps=3"]
    verifier = ["--reward.verifier", f"{tmp_path}/mine.py:judge"]
    config = load_config(home / "tiny.toml", [*arguments, *verifier])
    resumed = build(config, console=Console(RichConsole(file=io.StringIO())), resume=True)
    with pytest.raises(RunError, match="for 3 steps in a row"):
        resumed.run()
    assert resumed.step == 2


def test_the_command_line_tells_the_sum(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(SOME)
    given = ["--output_dir", str(tmp_path), "--reward.verifier", f"{tmp_path}/mine.py:judge", *SHORT]
    assert main(["train", str(home / "tiny.toml"), *given]) == 0
    assert "24 of 24 responses could not be judged" in " ".join(capsys.readouterr().out.split())


SKIPS = """
def judge(text, entry):
    if len(text) % 2:
        return {"reward": None, "skipped": "odd"}
    return {"reward": float(len(text) % 4 == 0), **({"unparsed": "form"} if len(text) % 4 else {})}
"""


def test_what_the_verifier_skips_is_counted_and_no_part_of_an_update(home: Path, tmp_path: Path) -> None:
    run = Run(home, tmp_path, "--reward.on_failure=zero", "--trainer.prompts_per_step=4", verifier=SKIPS)
    assert run.run().failures == []
    for step, row in enumerate(run.rows[1:], 1):
        written = pq.read_table(run.config.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        odd = [len(r["response_text"]) % 2 == 1 for r in written]
        assert row["reward/skipped"] == row.get("reward/skipped_odd", 0) == sum(odd)
        kept = [r for r, skipped in zip(written, odd, strict=True) if not skipped]
        assert row["reward/unparsed"] == row.get("reward/unparsed_form", 0) == sum(r["reward"] == 0 for r in kept)
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in kept) / len(kept))
        assert row["reward/failed"] == 0
        for r, skipped in zip(written, odd, strict=True):
            assert (r["reward"] is None or r["reward"] != r["reward"]) == skipped
            assert (r["status"] == "failed") is False
            if skipped:
                assert not r["advantage"]  # zero, and so no part of the loss
    assert sum(row["reward/skipped"] for row in run.rows[1:]) > 0
    assert sum(row["reward/unparsed"] for row in run.rows[1:]) > 0


def test_a_run_whose_verifier_skips_everything_stops(home: Path, tmp_path: Path) -> None:
    run = Run(home, tmp_path, "--reward.max_failed_steps=1", verifier="def judge(text, entry): return None")
    with pytest.raises(RunError, match=r"1 step in a row \(reward.max_failed_steps\), the last with 'skipped'"):
        run.run()


def test_a_run_says_what_keeps_code_in(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "programs.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": f"assert add({i}, 1) == {i + 1}"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_file = ["--data.tasks=[]", f"--data.path={file}", "--evaluation.problems=0", "--evaluation.every=0"]
    run = Run(home, tmp_path, "--reward.verifier=code", "--trainer.steps=1", *of_file)
    run.run()
    assert run.rows[-1]["reward/unparsed_no_code"] == run.rows[-1]["reward/unparsed"] == 8
    assert run.out.getvalue().count("Code in responses runs in ") == 1
