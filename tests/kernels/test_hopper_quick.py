"""Attention of flash-attn 4 and the head's products on quack, compiled for Hopper and Blackwell: the few compilations
that CI has time for (`make hopper-quick`); `make hopper` has all, their machine code and their caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from .hopper_builds import Job, build, vocabulary

pytest.importorskip("flash_attn.cute", reason="flash-attn 4 is not installed: `make hopper-quick`")
pytestmark = pytest.mark.hopper

ATTENTION = ("attention, flash, forward", "attention, flash, backward")
HEAD = ("head, cute, exponentials", "head, cute, gradients")


def test_compiles(tmp_path: Path) -> None:
    """The head's gradient takes a product of hidden, and one of the weight that writes and one that adds."""
    jobs = [Job(arch, arch, 128, vocabulary(192), steps=HEAD + ATTENTION) for arch in ("90a", "100a")]
    for steps in build(jobs, tmp_path).values():
        assert tuple(steps) == HEAD + ATTENTION
        assert all(steps.values())
        assert [steps[step] for step in HEAD] == [1, 3]
