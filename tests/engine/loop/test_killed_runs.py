"""A run whose parts remember: killed at random moments and resumed, it ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ...support.processes import Process, forking
from ...support.tiny import write_job

MINE = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 3 == 0)
"""
STEPS = 6
FLAGS = (
    "--recipe=gvm", "--algorithm.objective=ppo", "--algorithm.advantage=cumulative",
    "--data.curriculum_options={n=4,pilot=2,alpha=0.5,most=6}", "--reward.shaping=[{name='exploration',"
    "options={pattern='(\\S)'}}]", "--replay.share=0.25", "--replay.keep=unequal", "--replay.prefer=1.0",
    "--loop.callback=hint_ladder", "--loop.callback_options={columns=['answer'],patience=1}",
    "--loop.train_context=plain", "--trainer.prompts_per_step=8", "--trainer.max_tokens=4096", "--trainer.lr=0.01",
    f"--trainer.steps={STEPS}", "--checkpoint.every=1", "--evaluation.problems=0", "--evaluation.every=0",
    "--trainer.self_check=false", "--algorithm.select=sampled",
)  # fmt: skip
"""A curriculum, credit, shaping, callback and replay store with state."""


@pytest.fixture(scope="module")
def toml(tmp_path_factory) -> Path:
    path = write_job(tmp_path_factory.mktemp("killed"), MINE)
    problems = path.parent / "problems.jsonl"
    gone = ("tasks", 'objective = "dapo"', "advantage", "program", "n = ")
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith(gone))
    path.write_text(text.replace("[data]", f'[data]\npath = "{problems}"').replace("reward.py:judge", "mine.py:odd"))
    rows = [{"prompt": f"{a} + 3 =", "answer": str(a + 3)} for a in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ended(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the last checkpoint."""
    folder = directory / "runs" / "tiny" / "checkpoints" / f"step_{STEPS:06d}"
    files = sorted(folder.rglob("*.safetensors"))
    assert files, list(folder.rglob("*"))
    return {f"{file.relative_to(folder)}/{name}": t for file in files for name, t in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_change_no_bit(toml, tmp_path, seed) -> None:
    moment = random.Random(seed)

    def command(name: str, *more: str) -> list[str]:
        return ["train", str(toml), f"--output_dir={tmp_path / name}/runs", *FLAGS, *more]

    with forking() as server:
        assert Process(server, command("whole")).wait() == 0
        log = tmp_path / "killed" / "runs" / "tiny" / "metrics.jsonl"
        kills = 0
        for after in (2, 4, 5):
            run = Process(server, command("killed", *(["--resume"] if kills else [])))
            run.await_row(log, after)
            time.sleep(moment.uniform(0, 0.6))
            if not run.ended():
                os.kill(run.pid, signal.SIGKILL)
                kills += 1
            run.wait()
        assert kills >= 2
        assert Process(server, command("killed", "--resume")).wait() == 0
    whole, killed = ended(tmp_path / "whole"), ended(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    different = [name for name, tensor in whole.items() if not torch.equal(tensor, killed[name])]
    assert not different, different[:5]
    states = [(tmp_path / name / "runs" / "tiny" / "checkpoints" / f"step_{STEPS:06d}") for name in ("whole", "killed")]
    texts = [{file.name: json.loads(file.read_text()) for file in sorted(state.rglob("*.json"))} for state in states]
    assert texts[0].keys() == texts[1].keys()
    kept = [json.dumps(some, sort_keys=True) for some in texts]
    assert "exploration" in kept[0]
    assert "seen" in kept[0]
