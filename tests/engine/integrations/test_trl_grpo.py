"""GRPO through TRL's own trainer, with and without `accelerate`: loss, gradient norm, every metric, every weight.

What the two sample must be the same, so `rollouts` is off here; `test_trl_rollouts` has it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .trl_tiny import assert_same, grpo, save_model

TREE = {"rollouts": False}
FLAT = {"tree": False, "rollouts": False}
OLD = {"num_iterations": 2, "learning_rate": 0.5, "epsilon": 0.02}  # ratios that are clipped


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


@functools.cache
def baseline(path: str, case: str) -> Any:
    return grpo(path, None, **CASES[case])


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "cispo": {"epsilon_high": 1.01},
    "sapo": {},
    "vespo": {},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "kl": {"beta": 0.3},
    "kl of grpo": {"beta": 0.3, "loss_type": "grpo", "use_bias_correction_kl": True},
    "kl of gspo": {"beta": 0.3, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "delta": {"delta": 1.05},
    "delta inside": {"delta": 1.01},
    "off policy mask": {"off_policy_mask_threshold": 1e-4},
    "high entropy": {"top_entropy_quantile": 0.4},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 3.5, "entropy_coef": 0.01},
    "temperature": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "truncated": {"mask_truncated_completions": True},
    "luspo of tokens": {"loss_type": "luspo"},
    "dual bounds": {"epsilon_high": 0.05},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "multiple": {"pad_to_multiple_of": 8},
}
CASES = {f"{loss} {when}": {"loss_type": loss, **(OLD if when == "off" else {}), **more}
         for loss, more in LOSSES.items() for when in ("on", "off")}  # fmt: skip
CASES |= {name: OLD | more for name, more in OPTIONS.items()}


@pytest.mark.parametrize("parts", [FLAT, TREE], ids=["flat", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_same(path: str, case: str, parts: dict[str, bool]) -> None:
    assert_same(baseline(path, case), grpo(path, parts, **CASES[case]))
