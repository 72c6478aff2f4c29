"""flash-attn 4 under a tree's mask for Hopper and Blackwell: the few compilations that CI has time for, found again by
another process (`make hopper-quick`); `make hopper` compiles all and reads their machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .hopper_builds import Job, build

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper-quick`")
pytestmark = pytest.mark.hopper

STEPS = ("attention, flash, forward", "attention, flash, backward")


def test_compiles(tmp_path: Path) -> None:
    """Both directions compile for both GPUs, and another process compiles nothing."""
    hopper = Job("Hopper", "90a", 128, steps=STEPS)
    jobs = [hopper, Job("Blackwell", "100a", 128, steps=STEPS), replace(hopper, name="Hopper again")]
    compiled = build(jobs, tmp_path)
    assert {name: tuple(steps) for name, steps in compiled.items()} == {job.name: job.steps for job in jobs}
    assert set(compiled.pop("Hopper again").values()) == {0}
    assert all(count for steps in compiled.values() for count in steps.values())
