"""Fixtures of the tests of recipes: a file of problems, and the steps of a run with a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ...support.real_step import Steps
from .problem_runs import steps_of_recipes, write_problems


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The TOML of `write_problems`."""
    return write_problems(tmp_path_factory.mktemp("problems"))


@pytest.fixture(scope="module")
def step_of(toml, tmp_path_factory) -> Callable[[str], Steps]:
    return steps_of_recipes(toml, tmp_path_factory)
