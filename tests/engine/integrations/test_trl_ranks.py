"""GRPO on two ranks under DDP, with and without `accelerate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .trl_tiny import WHOLE, save_model

SCRIPT = """
import json, sys
from tests.engine.integrations.trl_tiny import grpo

path, out, parts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = dict(num_iterations=2, learning_rate=0.5, per_device_train_batch_size=4, gradient_accumulation_steps=2)
done = grpo(path, parts, beta=0.1, **options)
if done.accelerator.is_main_process:
    weights = {name: weight.detach().double().norm().item() for name, weight in done.model.named_parameters()}
    json.dump([done.state.log_history, weights], open(out, "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{"rollouts": False}, {"tree": False, "rollouts": False}], ids=["tree", "flat"])
def test_two_ranks(tmp_path: Path, parts: dict[str, bool]) -> None:
    path = save_model(tmp_path / "model")
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    found = []
    for i, given in enumerate((None, parts)):
        out = tmp_path / f"{i}.json"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), path, str(out)]
        root = Path(__file__).parents[3]
        environment = {"PYTHONPATH": f"{root}:{':'.join(sys.path)}", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command, json.dumps(given)], env={**os.environ, **environment},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(out.read_text()))
    (theirs, weights), (ours, own) = found
    for a, b in zip(theirs, ours, strict=True):
        for name in a.keys() - WHOLE - {"entropy", "kl"} - {key for key in a if key.startswith("clip_ratio")}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    assert own == pytest.approx(weights, rel=1e-5)
