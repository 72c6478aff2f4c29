"""The sweep of tile sizes: candidates are timed against the default, and wrong or failing ones never win."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rolltree.bench import sweep
from rolltree.kernels.machine import interpreting

CPU = torch.device("cpu")


@pytest.mark.skipif(not interpreting(), reason="Triton runs on the CPU in its interpreter")
@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=() if name == "attention" else pytest.mark.slow) for name in sweep.KERNELS]
)
def test_sweep(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Candidates reach the kernel, give what the default gives, and are not tried twice."""
    candidates = list(sweep.KERNELS[kernel](CPU, True))[:2]
    monkeypatch.setitem(sweep.KERNELS, kernel, lambda device, small: iter(candidates))
    arguments = [kernel, "--device", "cpu", "--rehearse", "--out", str(tmp_path)]
    assert sweep.main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert len(lines) == len(candidates)
    assert all(line["difference"] <= 1e-5 for line in lines), lines
    assert "of the default's time" in capsys.readouterr().out
    assert sweep.main(arguments) == 0
    assert len((tmp_path / "sweep.jsonl").read_text().splitlines()) == len(candidates)


@pytest.mark.skipif(not interpreting(), reason="Triton runs on the CPU in its interpreter")
def test_a_candidate_that_does_not_run_or_is_wrong_does_not_win() -> None:
    good = next(sweep.attention(CPU, True))

    def refused(*_: object, **__: object) -> None:
        raise ValueError("out of shared memory")

    line = sweep.tried(replace(good, value=refused), CPU, 0.0)
    assert "out of shared memory" in line["reason"]
    results = iter([torch.ones(3), torch.full((3,), 2.0)])
    line = sweep.tried(replace(good, call=lambda: next(results)), CPU, 0.0)
    assert "differs by 1.00e+00" in line["reason"]
    assert "ms" not in line
