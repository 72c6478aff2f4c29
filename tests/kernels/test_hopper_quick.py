"""Attention of flash-attn 4 and the head's products on quack, compiled for Hopper, attention for Blackwell too: the few
compilations that CI has time for (`make hopper-quick`); `make hopper` has all, their machine code and their caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper-quick`")
pytestmark = pytest.mark.hopper

ATTENTION = ["attention, flash, forward", "attention, flash, backward"]
HEAD = ["head, cute, exponentials", "head, cute, gradients"]
BUILD = """
import json, sys
from rolltree.kernels import ahead
for built in ahead.build_hopper(ahead.TARGETS[sys.argv[1]], ahead.Model(8, 4, 128, 128 * 192), sys.argv[2:]):
    print(json.dumps(built._asdict()))
"""


@pytest.mark.parametrize(("arch", "steps"), [("90a", [*HEAD, *ATTENTION]), ("100a", ATTENTION)])
def test_compiles(tmp_path: Path, arch: str, steps: list[str]) -> None:
    """The head's gradient takes a product of hidden, and one of the weight that writes and one that adds."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"ROLLTREE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, arch, *steps], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == steps
    assert all(row["compiled"] >= 1 for row in rows)
    assert [row["compiled"] for row in rows if row["name"] in HEAD] == ([1, 3] if arch == "90a" else [])
