"""TRL's `DistillationTrainer` and `GKDTrainer`, with and without `accelerate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from .trl_tiny import PROMPTS, arguments, assert_same, save_model, tokenizer, train

pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")

from datasets import Dataset
from peft import LoraConfig
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from rolltree.engine import UserError
from rolltree.engine.integrations.trl import accelerate

GREEDY = {"generation_kwargs": {"do_sample": False}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student, and a teacher of another width."""
    teacher = save_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=3)
    return save_model(tmp_path_factory.mktemp("trl")), teacher


def make(paths: tuple[str, str], trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    student, teacher = paths
    given = dict(max_completion_length=8, learning_rate=0.5, gradient_checkpointing=False) | options
    rows = Dataset.from_dict({"prompt": [p for p in PROMPTS for _ in range(4)] * 2})
    config = DistillationConfig(**arguments(Path(student), **given))
    return DistillationTrainer(student, teacher, args=config, train_dataset=rows, **(trainer or {}))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reverse KL": ({}, {}),
    "forward KL": ({}, {"beta": 0.0, "temperature": 0.7}),
    "JSD": ({}, {"beta": 0.3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
    "lora": ({"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)}, {}),
}


@pytest.mark.parametrize("parts", [{"tree": False, "rollouts": False}, {"rollouts": False}], ids=["flat", "tree"])
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.check) if c != "JSD" else c for c in CASES])
def test_loss_and_weights_are_those_of_trl(paths: tuple[str, str], case: str, parts: dict[str, bool]) -> None:
    given, options = CASES[case]
    theirs, ours = (train(make(paths, given, **options), each) for each in (None, parts))
    if case == "JSD":  # the mean over micro-batches, which have other sequences
        for trainer in (theirs, ours):
            trainer.state.log_history = [
                {k: v for k, v in row.items() if k != "entropy"} for row in trainer.state.log_history
            ]
    assert_same(theirs, ours, 1e-5)
    assert ours.rolltree.said == set()


def test_a_tree_computes_each_prompt_once(paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of one batch, and the rows that both models compute for it."""
    theirs, ours = make(paths), accelerate(make(paths), rollouts=False)
    prompt, completion = torch.tensor([[0, 3, 4, 5]] * 4), torch.randint(3, 29, (4, 6))
    completion[:, 0] = torch.arange(3, 7)  # where the paths part
    inputs = {
        "prompt_ids": prompt, "prompt_mask": (prompt != 0).long(), "completion_ids": completion,
        "completion_mask": torch.ones_like(completion), "num_items_in_batch": torch.tensor(24.0),
    }  # fmt: skip
    rows = []
    ours.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    gradients = []
    for trainer in (theirs, ours):
        loss = trainer.compute_loss(trainer.model, copy.deepcopy(inputs))
        loss.backward()
        gradients.append([p.grad for p in trainer.model.parameters()])
    assert rows == [3 + 4 * 6]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(float(a.abs().max()), 1e-3)


def test_the_engine_samples(paths: tuple[str, str]) -> None:
    theirs, ours = (train(make(paths, **GREEDY), parts) for parts in (None, {}))
    assert_same(theirs, ours, 1e-5)
    assert ours.rolltree.rollouts is not None


@pytest.mark.parametrize("options", [{}, {"beta": 1.0, "temperature": 0.7}], ids=["JSD", "reverse KL"])
def test_gkd(paths: tuple[str, str], options: dict[str, Any]) -> None:
    student, teacher = paths
    tokens = tokenizer()
    tokens.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    turns = [[{"role": "user", "content": p}, {"role": "assistant", "content": "the quick fox"}] for p in PROMPTS]

    def make() -> Any:
        given = dict(lmbda=0.0, max_length=32, per_device_train_batch_size=4, learning_rate=0.5) | options
        config = GKDConfig(**arguments(Path(student), **given))
        rows = Dataset.from_dict({"messages": turns * 2})
        return GKDTrainer(student, teacher, args=config, train_dataset=rows, processing_class=tokens)

    theirs, ours = train(make(), None), train(make(), {})
    assert_same(theirs, ours, 1e-5)


def test_what_is_left_to_trl(paths: tuple[str, str]) -> None:
    class Mine(DistillationTrainer):
        def _compute_loss(self, *args: Any) -> Any:
            return super()._compute_loss(*args)

    trainer = make(paths)
    trainer.__class__ = Mine
    accelerate(trainer, rollouts=False)
    assert [said for said in trainer.rolltree.said if "Mine has a _compute_loss of its own" in said]
    elsewhere = make(paths)
    elsewhere.teacher_model = None
    with pytest.raises(UserError, match="has its teacher elsewhere than in `teacher_model`"):
        accelerate(elsewhere)
