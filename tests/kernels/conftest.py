"""Fixtures of the tests of Hopper's kernels: everything is compiled once."""

from __future__ import annotations

import pytest

from . import hopper_builds


@pytest.fixture(scope="session")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> hopper_builds.Hopper:
    """All kernels of flash-attn 4, compiled, and found again by another process."""
    return hopper_builds.Hopper(tmp_path_factory.mktemp("hopper"))
