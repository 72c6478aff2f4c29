"""Trains examples/openenv_letters_cpu.toml with three seeds and draws docs/openenv_letters.png: ``make openenv``.

    python docs/openenv_letters.py [FOLDER]

The environment is the one that ``openenv init letters`` writes into FOLDER (build/openenv). Runs that are there are not
repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
SPANS = ((1, 1), (2, 10), (11, 20), (21, 30))
"""First and last steps of the columns of the table."""


def rewards(folder: Path, seed: int) -> np.ndarray:
    """Return the mean reward of each step of a run, which is made if it is not there."""
    run = folder / "runs" / f"letters_{seed}"
    if not (run / "export").exists():
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [
            sys.executable,
            "-m",
            "rolltree.engine.app.cli",
            "train",
            str(ROOT / "examples/openenv_letters_cpu.toml"),
        ]
        flags = [f"--seed={seed}", f"--name={run.name}", f"--output_dir={run.parent}"]
        subprocess.run([*command, *flags], check=True, cwd=folder, env=os.environ | {"PYTHONPATH": paths})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return np.array([row["reward/mean"] for row in rows if row["step"] > 0])


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "letters").exists():
        subprocess.run(["openenv", "init", "letters"], check=True, cwd=folder)
    curves = np.stack([rewards(folder, seed) for seed in SEEDS])
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    steps = np.arange(1, curves.shape[1] + 1)
    for curve in curves:
        axes.plot(steps, curve, color="#3b82f6", alpha=0.35, linewidth=1)
    axes.plot(steps, curves.mean(0), color="#3b82f6", linewidth=2, label=f"mean of {len(SEEDS)} seeds")
    axes.set(xlabel="step", ylabel="reward of the environment", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(ROOT / "docs" / "openenv_letters.png", dpi=110, metadata={"Software": None})
    print("| seed |", " | ".join(f"step {a}" if a == b else f"steps {a} to {b}" for a, b in SPANS), "|")
    for seed, curve in zip(SEEDS, curves, strict=True):
        print(f"| {seed} |", " | ".join(f"{curve[a - 1 : b].mean():.2f}" for a, b in SPANS), "|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build" / "openenv").resolve())
