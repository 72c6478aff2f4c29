"""Kernels compiled for a GPU that is not there, by the launch code itself, and found again by another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltree.kernels import ahead

from .on_device import needs_triton

PROGRAM = """
import itertools, json
from rolltree.kernels import ahead
steps = ahead.build(ahead.TARGETS["90a"], ahead.Model(heads=2, kv_heads=1, head_dim=16, vocab=300), flash=False)
for built in itertools.islice(steps, 1):
    print(json.dumps(built._asdict()))
"""


@needs_triton
@pytest.mark.slow
def test_a_second_process_finds_every_kernel(tmp_path: Path) -> None:
    """The head's row kernels; `make hopper` does the same with all that a training step launches."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    counts = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        counts.append({row["name"]: row["compiled"] for row in map(json.loads, done.stdout.splitlines())})
    assert list(counts[0]) == list(counts[1])
    assert all(counts[0].values())
    assert set(counts[1].values()) == {0}


def test_an_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        next(ahead.build(ahead.TARGETS["90a"], ahead.Model(2, 1, 16, 300), flash=False))
