"""GRPO through TRL's own trainer, with and without `accelerate`: loss, gradient norm, every metric, every weight."""

from __future__ import annotations

from typing import Any

import pytest

from .trl_tiny import assert_same, grpo, save_model

TREE = {"rollouts": False}
FLAT = {"tree": False, "rollouts": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "greedy": {"generation_kwargs": {"do_sample": False}},
}


@pytest.mark.parametrize("parts", [FLAT, TREE], ids=["flat", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_same(path: str, case: str, parts: dict[str, bool]) -> None:
    assert_same(grpo(path, None, **CASES[case]), grpo(path, parts, **CASES[case]))


def test_greedy_rollouts(path: str) -> None:
    options = {
        "generation_kwargs": {"do_sample": False},
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "beta": 0.1,
    }
    assert_same(grpo(path, None, **options), grpo(path, {}, **options))
