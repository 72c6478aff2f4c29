"""``make gpu``: every GPU test, then every benchmark, in parts of less than ten minutes.

``python -m rolltree.bench.gpu [part ...]`` runs the parts named, or all that have not yet passed at this commit, so a
run cut short goes on where it stopped. Parts are ``test:<file>`` and ``bench:<op>``; each runs in a process of its own.
Rows go to ``bench/results/<device>/<op>.jsonl``; the table of this run's rows comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .cli import OPS
from .schema import REPOSITORY, commit, folder_name, read
from .table import table

PART_SECONDS = 570
NOTHING_COLLECTED = 5  # pytest's exit code
RECORD = REPOSITORY / "build" / "gpu" / "passed.json"


def test_parts() -> dict[str, list[str]]:
    """Command of each test part: kernel tests whole, since Triton is real here, of the others those marked gpu."""
    parts = {}
    for path in sorted((REPOSITORY / "tests").glob("*/test_*.py")):
        name = str(path.relative_to(REPOSITORY / "tests"))
        pytest = [sys.executable, "-m", "pytest", "-q", str(path)]
        if path.parent.name == "kernels":
            parts[f"test:{name}"] = pytest
        elif "mark.gpu" in path.read_text():
            parts[f"test:{name}"] = [*pytest, "-m", "gpu"]
    return parts


def results_file(op: str) -> Path:
    return REPOSITORY / "bench" / "results" / folder_name(torch.device("cuda")) / f"{op}.jsonl"


def bench_parts() -> dict[str, list[str]]:
    command = [sys.executable, "-m", "rolltree.bench"]
    return {f"bench:{op}": [*command, op, "--device", "cuda", "--out", str(results_file(op))] for op in OPS}


def run_part(name: str, command: list[str]) -> bool:
    """Whether the part passed; its output goes straight to the terminal."""
    print(f"== {name}", flush=True)
    if name.startswith("bench:"):
        results_file(name.removeprefix("bench:")).unlink(missing_ok=True)  # one run's rows, not a history
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    start = time.perf_counter()
    try:
        code = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=PART_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"== {name}: stopped after {PART_SECONDS} s", flush=True)
        return False
    passed = code in (0, NOTHING_COLLECTED)
    print(
        f"== {name}: {'passed' if passed else f'FAILED, exit code {code}'}, {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part that ran passed, 1 if one failed, 2 for a wrong command line or no GPU."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Every GPU test, then every benchmark.")
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all that have not passed at this commit")
    parser.add_argument("--list", action="store_true", help="only list the parts")
    args = parser.parse_args(argv)
    tests = test_parts()
    if not tests:
        print(f"make gpu needs a checkout with its tests; there are none in {REPOSITORY / 'tests'}.", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join([*tests, *(f"bench:{op}" for op in OPS)]))
        return 0
    if not torch.cuda.is_available():
        print(
            "make gpu needs a CUDA device and a torch built for it, and finds none; see `rolltree doctor`.",
            file=sys.stderr,
        )
        return 2
    parts = tests | bench_parts()
    if unknown := [name for name in args.parts if name not in parts]:
        print(f"make gpu has no part '{unknown[0]}'; --list names them.", file=sys.stderr)
        return 2
    head = commit()
    passed: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chosen = args.parts or [name for name in parts if passed.get(name) != head or head.endswith("-dirty")]
    failed = []
    for name in chosen:
        if run_part(name, parts[name]):
            passed[name] = head
            RECORD.parent.mkdir(parents=True, exist_ok=True)
            RECORD.write_text(json.dumps(passed, indent=1))
        else:
            failed.append(name)
    measured = [results_file(name.removeprefix("bench:")) for name in chosen if name.startswith("bench:")]
    rows = [row for path in measured if path.exists() for row in read(path)]
    if rows:
        print(table(rows))
    skipped = len(parts) - len(chosen) if not args.parts else 0
    print(f"{len(chosen) - len(failed)} of {len(chosen)} parts passed, {skipped} had passed at {head} before.")
    if failed:
        print(f"Failed: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
