"""Every Triton kernel compiles for sm_80, sm_90 and sm_100 without spilling, although no GPU is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .aot.harness import OPS, AotResult

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("op", OPS)
def test_compiles(op: str) -> None:
    """In a process of its own: this one has Triton's interpreter in the compiler's place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot.harness", op, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("["), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    results = [AotResult.of(row) for row in json.loads(done.stdout)]
    assert results, f"tests/kernels/aot/{op}.py lists no kernel"
    bad = [result.line() for result in results if result.error]
    assert not bad, "\n".join(bad)
