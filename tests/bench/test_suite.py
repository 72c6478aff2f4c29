"""The pytest-benchmark suite, in short: every provider runs each op's first small case. No test looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.bench.cli import OPS
from rolltree.bench.runner import UnsupportedError
from rolltree.bench.suite import Entry, Prepared, entries

CPU = torch.device("cpu")
SUITE = Path(__file__).parents[2] / "bench" / "suite.py"


def first_cases() -> Iterator[Entry]:
    for _, of_op in groupby(entries(CPU, quick=True), key=lambda entry: entry.bench.op):
        of_case = list(of_op)
        yield from (entry for entry in of_case if entry.case is of_case[0].case)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return Prepared()


def marked(entry: Entry) -> Any:
    return pytest.param(entry, marks=[pytest.mark.slow] if entry.provider == "torch.compile" else [], id=str(entry))


@pytest.mark.slow(but=1)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("entry", [marked(entry) for entry in first_cases()])
def test_entry(entry: Entry, prepared: Prepared) -> None:
    if entry.bench.op == "trl_step":
        pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")
    if entry.provider == "rolltree compiled":
        pytest.skip("a minute of compilation, which test_graphs has")
    missing = ""
    try:
        prepared.call(entry)  # runs it once
    except UnsupportedError as error:
        missing = str(error)
    assert set(prepared.calls) <= set(entry.bench.directions), "a direction that the suite would leave out"
    if missing:
        ours = entry.provider.startswith(("rolltree", "torch,", "sdpa", "flat"))
        another_backend = entry.provider == "rolltree, flash"
        assert not ours or another_backend or (entry.direction not in prepared.calls and prepared.calls), missing
        pytest.skip(missing)


def test_every_op_is_in_the_suite() -> None:
    assert {entry.bench.op for entry in entries(CPU, quick=True)} == set(OPS)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed: see rolltree[dev]"
)
def test_the_suite_groups_by_op_and_shape_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(SUITE),
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "policy_loss: and not linear",
    ]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1", f"--benchmark-json={out}", "-p", "no:xdist"]
    # pytest-benchmark writes nothing in a worker of pytest-xdist, which it knows by its environment
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=SUITE.parents[1], env={**outside, "BENCH_QUICK": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["benchmarks"]
    assert {each["group"].partition(":")[0] for each in found} == {"policy_loss"}
    assert {each["name"] for each in found} >= {"rolltree", "torch"}
    assert len({(each["group"], each["name"]) for each in found}) == len(found)
    assert all(each["stats"]["median"] > 0 and each["extra_info"]["device"] for each in found)
