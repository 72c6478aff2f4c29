"""Instructions that decode attention and sampling execute on sm_90, read from machine code (`make aot`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .aot.harness import AotResult, table_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.aot


def run(*arguments: str) -> Any:
    """Run in a process of its own: this one has Triton's interpreter in the compiler's place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("["), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


def test_triton_decode() -> None:
    """Two tiles are in flight while one is multiplied, and enough blocks fit on a processor to hide the rest."""
    found = {
        r.case: r for r in map(AotResult.of, run("tests.kernels.aot.harness", "tree_decode", "--arch", "90", "--json"))
    }
    for dim, blocks, instructions in ((64, 3, 510), (128, 2, 655)):
        kernel = found[f"decode partial D{dim} bf16"]
        (loop,) = kernel.loops
        assert not kernel.error
        assert (loop.wait, loop.small_copies, loop.local) == (2, 0, 0)
        assert loop.tensor_clocks == loop.useful_clocks
        assert kernel.ctas >= blocks
        assert loop.instructions <= instructions


def test_sampling() -> None:
    """Logits come 16 bytes a thread, several programs fit, and no kernel has more instructions a token than written.

    29.5 instructions a token are 60 % of 3.35 TB/s in bf16, 59 in fp32: 132 x 128 lanes at 1.755 GHz issue 29.6e12.
    With filters these are the scan's and the selection's, whose searches take all the rounds that they can, and what
    finishes a row. Rows whose candidates are not enough are far from it, but for min-p alone in fp32.
    """
    found = {row["case"]: row for row in run("tests.kernels.sampling_figures")}
    for dtype, most in (("bf16", 29.5), ("fp32", 59)):
        assert found[f"sample scan {dtype} race"]["shortest"] <= 28.4
        scan, finish = found[f"sample scan {dtype}"]["shortest"], found["sample finish filtered"]["shortest"]
        for filters in ("top_k", "top_p", "min_p", "top_k top_p min_p"):
            assert scan + found[f"sample select {dtype} {filters}"]["longest"] + finish <= most
        for search in ("count", "mass"):
            parts = {kind: found[f"sample {kind} {dtype} {search}"] for kind in ("bracket", "gather", "settle")}
            assert parts["bracket"]["longest"] + parts["gather"]["longest"] + parts["settle"]["shortest"] <= 95
            assert parts["gather"]["longest"] <= 51  # in a pass of its own the race would be 34 more than gathering
    alone = ("sample select", "sample settle")  # on a processor, in whose registers a row's candidates lie
    assert all(
        row["wide_loads"] > 0 for name, row in found.items() if "bracket" not in name
    )  # eight tokens here and there
    assert all(row["ctas"] >= 2 for name, row in found.items() if not name.startswith(alone))
    written = {row["case"]: row for row in map(json.loads, table_file("sampling-").read_text().splitlines())}
    assert found == written
