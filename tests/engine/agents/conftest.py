from __future__ import annotations

import pytest

from rolltree.engine.rollout import NativeEngine

from ...support.agents import make_engine


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    """A small native engine for agents, whose keys have room for long episodes; the tests of one file share it."""
    return make_engine()
