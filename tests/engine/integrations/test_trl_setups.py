"""GRPO, with and without `accelerate`, in the setups of real runs: adapters, accumulation, checkpointing, tools."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig

from .trl_tiny import assert_same, grpo, save_model

TREE = {"rollouts": False}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, init_lora_weights=False)
OLD = {"num_iterations": 2, "learning_rate": 0.5}
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"peft_config": LORA}, OLD | {"beta": 0.2}),
    "checkpointing": ({}, OLD | {"gradient_checkpointing": True}),
    "reentrant": ({}, OLD | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "steps per generation": ({}, {"steps_per_generation": 4, "learning_rate": 0.5, "max_steps": 4}),
    "reference kept up": ({}, OLD | {"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "bfloat16": ({}, {"bf16": True}),
    "adamw": ({}, {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-3}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("setup", SETUPS)
def test_same(path: str, setup: str) -> None:
    trainer, options = SETUPS[setup]
    tolerance = {"bfloat16": 2e-2}.get(setup, 2e-5)
    assert_same(grpo(path, None, trainer, **options), grpo(path, TREE, trainer, **options), tolerance)
