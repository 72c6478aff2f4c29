"""Attention of flash-attn 4 for Hopper and Blackwell and the head's products on quack for Hopper, compiled: the few
compilations that CI has time for, found again (`make hopper-quick`); `make hopper` has all and their machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .hopper_builds import Job, build, vocabulary

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper-quick`")
pytestmark = pytest.mark.hopper

ATTENTION = ("attention, flash, forward", "attention, flash, backward")
HEAD = ("head, cute, exponentials", "head, cute, gradients")


def test_compiles(tmp_path: Path) -> None:
    """The head's gradient takes a product of hidden, and two of the weight, one of which adds. Another process
    compiles nothing."""
    hopper = Job("Hopper", "90a", 128, vocabulary(192), steps=HEAD + ATTENTION)
    jobs = [hopper, Job("Blackwell", "100a", 128, steps=ATTENTION), replace(hopper, name="Hopper again")]
    compiled = build(jobs, tmp_path)
    assert {name: tuple(steps) for name, steps in compiled.items()} == {job.name: job.steps for job in jobs}
    assert set(compiled.pop("Hopper again").values()) == {0}
    assert all(count for steps in compiled.values() for count in steps.values())
    assert [compiled["Hopper"][step] for step in HEAD] == [1, 3]
