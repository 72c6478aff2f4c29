"""The examples learn: each is trained for some steps on the arithmetic task, and what it is to reach comes nearer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolltree.engine import load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console

from ...support.tiny import ROOT

EXAMPLES = ROOT / "examples"
STEPS = 20
FAST = (
    f"--trainer.steps={STEPS}", "--trainer.lr=1e-4", "--trainer.lr_warmup_steps=2", "--evaluation.problems=256",
    "--evaluation.every=0", "--checkpoint.every=1000",
)  # fmt: skip
Train = Callable[..., tuple[list[dict[str, float]], Path]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(example, *overrides)``: the metrics of a run, and its directory; all of them share one first model."""
    home = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, home / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        subprocess.run([sys.executable, "examples/arithmetic_demonstrations.py"], check=True)

    def run(example: str, *overrides: str) -> tuple[list[dict[str, float]], Path]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(home)
            config = load_config(home / "examples" / f"{example}.toml", [*FAST, *overrides])
            build(config, console=Console()).run()
            directory = home / config.run_dir
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return rows, directory

    return run


def mean(rows: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Return the means over the first and over the last three steps that recorded ``name``."""
    values = [row[name] for row in rows if name in row]
    return float(np.mean(values[:3])), float(np.mean(values[-3:]))


def accuracies(rows: list[dict[str, float]]) -> tuple[float, float]:
    return rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]


def reverse_kl(directory: Path, step: int) -> float:
    """Mean of log p - log p_teacher over the tokens sampled in a step."""
    rows = pq.read_table(directory / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
    gaps = [np.subtract(row["behaviour_logprob"], row["teacher_logprob"]) for row in rows]
    return float(np.concatenate(gaps).mean())


def test_ppo_with_a_critic_learns(train: Train) -> None:
    rows, _ = train("ppo_critic_cpu")
    before, after = accuracies(rows)
    assert after > before + 0.05
    first, last = mean(rows, "critic/vf_loss")
    assert last < first


def test_grpo_with_a_kl_learns_and_a_huge_coefficient_keeps_the_reference(train: Train) -> None:
    rows, _ = train("grpo_kl_cpu")
    before, after = accuracies(rows)
    assert after > before + 0.05
    bound, _ = train("grpo_kl_cpu", "--name=bound", "--algorithm.objective_options={kl_coef=1000.0}")
    # the optimiser steps by its rate however small the gradient, so the policy stays around the reference, not at it
    assert mean(bound, "actor/kl_loss")[1] < 0.5 * mean(rows, "actor/kl_loss")[1]


def test_dpo_prefers_right_answers(train: Train) -> None:
    rows, _ = train("dpo_tree_cpu")
    early = [row["dpo/margins"] for row in rows if "dpo/margins" in row][1:9]
    assert np.mean(early) > 0  # later the pairs are of a policy that has moved on: what it prefers it samples
    before, after = accuracies(rows)
    assert after > before + 0.2


def test_demonstrations_are_learned_and_teach_the_next_pupil(train: Train) -> None:
    """Supervised learning lowers the NLL; what it made then teaches the first model, whose reverse KL to it falls."""
    fading = (
        "--algorithm.weight=[[0, 0.0], [12, 1.0]]",
        '--algorithm.terms=[{name="teach", objective="sft", select="injected", weight=[[0, 1.0], [12, 0.0]]}]',
    )
    rows, teacher = train("sft_then_rl_cpu", *fading)
    first, last = mean(rows, "teach/pg_loss")
    assert last < 0.9 * first
    before, after = accuracies(rows)
    assert after > before + 0.05
    rows, directory = train("distillation_cpu", f"--roles.teacher.path={teacher / 'export'}")
    gaps = [reverse_kl(directory, step) for step in range(1, STEPS + 1)]
    assert np.mean(gaps[-3:]) < 0.7 * np.mean(gaps[:3])


@pytest.mark.parametrize("example", ["tools_cpu", "agent_cpu"])
def test_a_calculator_is_learned(train: Train, example: str) -> None:
    """Held-out problems are answered with the tool, which the first model rarely calls."""
    rows, directory = train(example)
    before, after = accuracies(rows)
    assert after > before + 0.2
    written = pq.read_table(directory / "rollouts" / f"step_{STEPS:06d}.parquet").to_pylist()
    assert np.mean(["<tool_call>" in row["response_text"] for row in written]) > 0.5
