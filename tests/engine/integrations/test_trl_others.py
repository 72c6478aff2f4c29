"""RLOO, DPO and SFT through TRL's own trainers, with and without `accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from .trl_tiny import arguments, assert_same, dataset, reward, save_model, train

ONES = ["a", "bb", "c d", "ab"]
TEXTS = ["the quick fox", "a", "jumps over", "the lazy dogs of old"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


def rloo(path: str, parts: dict[str, bool] | None, **options: Any) -> Any:
    given = dict(num_generations=4, max_completion_length=8, num_iterations=2, learning_rate=0.5, beta=0.1) | options
    config = RLOOConfig(**arguments(Path(path), **given))
    return train(RLOOTrainer(path, reward_funcs=reward, args=config, train_dataset=dataset()), parts)


def dpo(path: str, parts: dict[str, bool] | None, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    pairs = {"prompt": ["abc ", "q ", "hello ", "x y "] * 4, "chosen": TEXTS * 4, "rejected": ONES * 4}
    config = DPOConfig(**arguments(Path(path), per_device_train_batch_size=4, learning_rate=0.5, **options))
    return train(DPOTrainer(path, args=config, train_dataset=Dataset.from_dict(pairs), **(trainer or {})), parts)


def sft(path: str, parts: dict[str, bool] | None, **options: Any) -> Any:
    config = SFTConfig(**arguments(Path(path), per_device_train_batch_size=4, learning_rate=0.5, **options))
    return train(SFTTrainer(path, args=config, train_dataset=Dataset.from_dict({"text": TEXTS * 4})), parts)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("parts", [{"tree": False, "rollouts": False}, {"rollouts": False}], ids=["flat", "tree"])
def test_rloo(path: str, parts: dict[str, bool]) -> None:
    assert_same(rloo(path, None), rloo(path, parts))


def test_rloo_samples_by_the_engine(path: str) -> None:
    greedy = {"generation_kwargs": {"do_sample": False}, "beta": 0.0}
    assert_same(rloo(path, None, **greedy), rloo(path, {}, **greedy), moves=False)


DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {}),
    "sft beside": ({}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "weighted": ({}, {"use_weighting": True}),
    "length": ({}, {"ld_alpha": 0.5}),
    "lora": ({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)}, {}),
}


@pytest.mark.slow(but=2)
@pytest.mark.check
@pytest.mark.parametrize("case", DPO)
def test_dpo(path: str, case: str) -> None:
    trainer, options = DPO[case]
    assert_same(dpo(path, None, trainer, **options), dpo(path, {}, trainer, **options))


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "dft"}, {"gradient_accumulation_steps": 2}, {"packing": True, "max_length": 24}],
    ids=["nll", "dft", "accumulated", "packed"],
)  # fmt: skip
def test_sft(path: str, options: dict[str, Any]) -> None:
    assert_same(sft(path, None, **options), sft(path, {}, **options))
