"""Trains examples/harbor_cpu.toml with three seeds and tells its rewards: ``make harbor``.

    python docs/harbor_shell.py [FOLDER]

Runs are below FOLDER (build/harbor); those that are there are not repeated. It takes podman, and where no registry is
reached an image of the machine's busybox.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import tomli_w

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.harbor import OPTIONS, no_podman  # noqa: E402

SEEDS = (0, 1, 2)
SPANS = ((1, 1), (2, 3), (4, 6))
"""First and last steps of the columns of the table."""


def rewards(folder: Path, seed: int) -> np.ndarray:
    """Return the mean reward of each step of a run, which is made if it is not there."""
    run = folder / "runs" / f"harbor_{seed}"
    if not (run / "export").exists():
        command = [sys.executable, "-m", "rolltree.engine.app.cli", "train", str(folder / "run.toml")]
        flags = [f"--seed={seed}", f"--name={run.name}"]
        subprocess.run([*command, *flags], check=True, cwd=ROOT)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return np.array([row["reward/mean"] for row in rows if row["step"] > 0])


def write(folder: Path) -> None:
    """Write the example with the engine of containers that works without systemd."""
    job = tomllib.loads((ROOT / "examples" / "harbor_cpu.toml").read_text(encoding="utf-8"))
    job["output_dir"] = str(folder / "runs")
    job["model"] = {"path": str(folder / "model"), "create": f"{ROOT / 'examples' / 'harbor_warmup.py'}:create"}
    job["rollout"]["program_options"]["environment_options"] |= OPTIONS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(tomli_w.dumps(job), encoding="utf-8")


def main(folder: Path) -> None:
    if why := no_podman():
        sys.exit(why)
    write(folder)
    curves = [rewards(folder, seed) for seed in SEEDS]
    print("| mean reward |", " | ".join(f"step {a}" if a == b else f"steps {a} to {b}" for a, b in SPANS), "|")
    for seed, curve in zip(SEEDS, curves, strict=True):
        print(f"| seed {seed} |", " | ".join(f"{curve[a - 1 : b].mean():.2f}" for a, b in SPANS), "|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else ROOT / "build" / "harbor").resolve())
