"""GRPO through TRL's own trainer, with and without `accelerate`: loss, gradient norm, every metric, every weight.

What the two sample must be the same, so `rollouts` is off here; `test_trl_rollouts` has it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rolltree.engine.integrations.trl import accelerate

from .trl_tiny import assert_same, grpo, make_grpo, save_model

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
    "kl, biased": {"beta": 0.3, "loss_type": "grpo", "use_bias_correction_kl": False},
    "kl of gspo, biased": {
        "beta": 0.3,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "use_bias_correction_kl": False,
    },
    "kl of gspo": {"beta": 0.3, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    "kl of vespo": {"beta": 0.3, "loss_type": "vespo"},
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


SOME = ("dapo on", "grpo off", "kl", "high entropy")
slow = pytest.mark.slow


RARE = (
    "luspo of tokens",
    "dual bounds",
    "multiple",
    "kl of gspo, biased",
    "kl of gspo",
    "kl of vespo",
    "delta inside",
    "adaptive entropy",
    "fp32 head",
    *(f"{loss} on" for loss in LOSSES if loss != "dapo"),  # on-policy ratios are 1, and bounds are idle
)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=slow) if case in RARE else case for case in CASES])
def test_trees(path: str, case: str) -> None:
    assert_same(baseline(path, case), grpo(path, TREE, **CASES[case]))


@pytest.mark.check(but=1)
@pytest.mark.parametrize("case", [case if case in SOME else pytest.param(case, marks=slow) for case in CASES])
def test_flat(path: str, case: str) -> None:
    assert_same(baseline(path, case), grpo(path, FLAT, **CASES[case]))


@slow
@pytest.mark.parametrize("case", ["dapo off", "gspo", "kl", "cispo off", "vespo off"])
def test_twenty_steps(path: str, case: str) -> None:
    options = CASES[case] | {"max_steps": 20, "learning_rate": 0.1}
    assert_same(grpo(path, None, **options), grpo(path, TREE, **options), 1e-3)


@pytest.mark.parametrize("case", [f"{loss} off" for loss in LOSSES])
def test_ratios_reach_the_bounds(path: str, case: str) -> None:
    """Otherwise the tests above would compare losses that are all the same."""
    logged = baseline(path, case).state.log_history[1]
    if "clip_ratio/region_mean" in logged:
        assert logged["clip_ratio/region_mean"] > 0
    elif "cispo_clip_ratio" in logged:
        assert logged["cispo_clip_ratio"] > 0
    elif "vespo/phi_seq_mean" in logged:
        assert abs(logged["vespo/phi_seq_mean"] - 1) > 1e-4


@pytest.mark.slow(but=11)
@pytest.mark.check(but=5)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith((" on", "multiple", "fp32 head"))])
def test_which_losses_are_one_op_with_the_head(path: str, case: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = accelerate(make_grpo(path, **CASES[case]), **TREE)
    assert (trainer.rolltree.objective is None) == (case in CODE)
    said = [record.getMessage() for record in caplog.records if record.name == "rolltree.trl"]
    assert len(said) == (case in CODE)
    assert not said or CODE[case] in said[0]


CODE = {
    "delta inside": "delta 1.01 lies inside the clip range",
    "high entropy": "top_entropy_quantile",
    "entropy bonus": "the entropy bonus is a mean of its own",
    "adaptive entropy": "the entropy bonus is a mean of its own",
    "kl of gspo": "use_bias_correction_kl",
    "kl of vespo": "use_bias_correction_kl",
}
"""Losses that stay TRL's code, and what is said of them."""
