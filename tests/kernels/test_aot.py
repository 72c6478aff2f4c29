"""Triton kernels compile ahead of time, without spilling in a loop and without atomics, although no GPU is there.

The default tests compile a sample for sm_90 (`harness.SAMPLE`); `make aot` compiles all cases for sm_80, sm_90 and
sm_100. The main loops of the main kernels compute nothing twice, do not wait for the copy they have just issued, copy
by 16 bytes, and are no worse than the figures that ``make aot-write`` wrote (bench/results/static-sm_*)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from .aot.harness import (
    OPS,
    READ,
    RESULTS,
    SAMPLE,
    STATIC,
    TABLED,
    AotResult,
    LoopFigures,
    cases,
    page,
    page_100,
    read_table,
    worse,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.check
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options",
    [("--sample", "--arch", "90"), *(pytest.param(("--arch", a), marks=pytest.mark.aot) for a in ("80", "90", "100"))],
    ids=" ".join,
)
def test_compiles(options: tuple[str, ...]) -> None:
    """It runs in a process of its own: this one has Triton's interpreter in the compiler's place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot.harness", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.stdout.startswith("["), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    results = [AotResult.of(row) for row in json.loads(done.stdout)]
    bad = [result.line() for result in results if result.error]
    assert not bad, "\n".join(bad)
    tables = {arch: read_table(arch) for arch in READ}
    known = [(r, tables[r.arch][r.case]) for r in results if r.arch in READ and r.case in tables[r.arch]]
    lost = [f"{now.case}: {', '.join(worse(now, before))}" for now, before in known if worse(now, before)]
    assert not lost, "\n".join([*lost, "If it is worth it, run make aot-write and commit the table."])


def test_the_page_shows_the_rows() -> None:
    assert (STATIC / "table.md").read_text() == page()
    assert (RESULTS / "static-sm_100" / "triton.md").read_text() == page_100()
    for row in map(json.loads, (STATIC / "triton-3.6.0.jsonl").read_text().splitlines()):
        if row["case"] in ("tree forward D128 bf16", "tree dq D64 bf16", "tree dkdv D128 bf16"):
            assert f"| {row['loops'][0]['instructions']} | " in page()


def test_no_row_has_a_fault() -> None:
    """`make aot-write` writes rows with faults and fails; such rows are not committed."""
    files = RESULTS.glob("static-sm_*/triton-*.jsonl")
    rows = [row for file in files for row in map(json.loads, file.read_text().splitlines())]
    assert [f"{row['case']}: {row['error']}" for row in rows if row["error"]] == []


def test_every_kernel_has_a_row() -> None:
    """A kernel without a row would be compared with nothing."""
    assert set(SAMPLE) <= {case.name for op in OPS for case in cases(op)}
    for arch in READ:
        listed = {case.name for op in OPS for case in cases(op) if arch in case.archs}
        files = sorted((RESULTS / f"static-sm_{arch}").glob("triton-*.jsonl"))
        assert len(files) >= 2  # what a GPU machine has, and the newest
        for file in files:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            assert {row["case"] for row in rows} == listed, file
            assert {row["arch"] for row in rows} == {arch}


def test_small_copies_cost_nothing() -> None:
    """Only dK/dV of 256 columns has some among the wholly visible tiles.

    The clocks that issue them (8 warps, 4 schedulers) are few compared with those of the round.
    """
    for file in STATIC.glob("triton-*.jsonl"):
        for row in map(AotResult.of, map(json.loads, file.read_text().splitlines())):
            if not TABLED.fullmatch(row.case):
                continue
            for loop, most in zip(row.loops, (0.008, 0.017), strict=False):
                assert not loop.small_copies or most > 0.01 or row.case == "tree dkdv D256 bf16", row.case
                assert loop.modelled is not None
                assert loop.small_copies * 8 / 4 <= most * loop.modelled[0], row.case


def test_worse_figures_are_seen() -> None:
    loop = LoopFigures(400, {}, 1024.0, 1024.0, 2, 8, 0, 0, (1024.0, 1800.0), "tensor")
    before = AotResult("kernel", 90, ctas=2, loops=(loop,))
    assert worse(before, before) == []
    for change in ({"instructions": 401}, {"tensor_clocks": 1025.0}, {"wait": 0}, {"local": 1}, {"small_copies": 1}):
        assert worse(replace(before, loops=(replace(loop, **change),)), before), change
    assert worse(replace(before, ctas=1), before)
    assert worse(replace(before, loops=()), before)
    straight = AotResult("kernel", 90, ctas=2, instructions=900)
    assert worse(straight, straight) == []
    assert worse(replace(straight, instructions=901), straight)
