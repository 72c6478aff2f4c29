"""GRPO, with and without `accelerate`, in the setups of real runs: adapters, checkpointing, accumulation, vLLM."""

from __future__ import annotations

import runpy
from argparse import Namespace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from rolltree.engine.integrations.trl.regroup import regroup

from .trl_tiny import assert_same, dataset, grpo, make_grpo, save_model, tokenizer, train

TREE = {"rollouts": False}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, init_lora_weights=False)
OLD = {"num_iterations": 2, "learning_rate": 0.5}
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({"peft_config": LORA}, OLD | {"beta": 0.2}),
    "checkpointing": ({}, OLD | {"gradient_checkpointing": True}),
    "reentrant": ({}, OLD | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "reference kept up": ({}, OLD | {"beta": 0.2, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "bfloat16": ({}, {"bf16": True}),
    "adamw": ({}, {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-3}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


@pytest.mark.check
@pytest.mark.parametrize(
    "setup",
    [s if s not in ("reentrant", "reference kept up") else pytest.param(s, marks=pytest.mark.slow) for s in SETUPS],
)
def test_same(path: str, setup: str) -> None:
    trainer, options = SETUPS[setup]
    tolerance = {"bfloat16": 2e-2}.get(setup, 2e-5)
    assert_same(grpo(path, None, trainer, **options), grpo(path, TREE, trainer, **options), tolerance)


class InGroups(GRPOTrainer):
    """TRL's trainer with the micro-batches of an update in the order of `accelerate`."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._buffered_inputs = regroup(self._buffered_inputs, self.args.gradient_accumulation_steps)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


ACCUMULATED: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "iterations": OLD | {"gradient_accumulation_steps": 2, "loss_type": "grpo"},
    "updates of a generation": OLD | {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4},
    "generations of an update": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "across generations": OLD | {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 3},
}


@pytest.mark.check
@pytest.mark.parametrize(
    "case",
    [c if c == "across generations" else pytest.param(c, marks=pytest.mark.slow) for c in ACCUMULATED],
)
def test_accumulated(path: str, case: str) -> None:
    """Loss, gradients and weights are those of any order; metrics are means over micro-batches, of the same order."""
    options = {"per_device_train_batch_size": 4, **ACCUMULATED[case]}
    ours = grpo(path, TREE, **options)
    shuffled, in_groups = grpo(path, None, **options), train(make_grpo(path, cls=InGroups, **options), None)
    assert_same(in_groups, ours)
    for log in (*shuffled.state.log_history, *ours.state.log_history):
        for name in {"entropy", "step_time", *(key for key in log if key.startswith(("clip_ratio", "kl")))}:
            log.pop(name, None)
    if case != "updates of a generation":  # there the groups of an update follow from the shuffle
        assert_same(shuffled, ours)


def test_groups_are_whole(path: str) -> None:
    trainer = make_grpo(path, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer.model.train()
    rows = [{"prompt": p} for p in ("abc", "b", "hello world", "q") for _ in range(4)]
    trainer._prepare_inputs(rows)
    before = trainer._buffered_inputs
    after = regroup(before, 4)
    for batch in after:
        assert len(batch["prompt_ids"].unique(dim=0)) == 1
    assert any(len(batch["prompt_ids"].unique(dim=0)) > 1 for batch in before)

    def sequences(batches: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        columns = ("prompt_ids", "completion_ids", "completion_mask", "advantages")
        return sorted(
            tuple(map(str, row)) for b in batches for row in zip(*(b[c].tolist() for c in columns), strict=True)
        )

    assert sequences(before) == sequences(after)


class FakeVllm:
    """Completions with log-probs that are those of no trainer, some of them missing."""

    def __init__(self, missing: bool) -> None:
        self.generator, self.missing = torch.Generator().manual_seed(0), missing

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[None, list[list[int]], list[list[list[Any]]], None]:
        lengths = torch.randint(2, 9, (len(prompts),), generator=self.generator).tolist()
        ids = [torch.randint(3, 30, (n,), generator=self.generator).tolist() for n in lengths]
        logprobs = [(-3.4 + 0.6 * torch.randn(n, generator=self.generator)).tolist() for n in lengths]
        known = [[[None if self.missing and i == 1 else x] for i, x in enumerate(some)] for some in logprobs]
        return None, ids, known, None


def with_vllm(path: str, parts: dict[str, bool] | None, missing: bool = False, **options: Any) -> Any:
    trainer = make_grpo(path, **options)
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, FakeVllm(missing)
    return train(trainer, parts)


VLLM: dict[str, dict[str, Any]] = {
    **{
        mode: {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5, "beta": 0.2}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "uncorrected": {"vllm_importance_sampling_correction": False},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "off policy mask": {"off_policy_mask_threshold": 0.1},
    "missing": {"missing": True, "off_policy_mask_threshold": 0.1},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
}


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("case", VLLM)
def test_vllm(path: str, case: str) -> None:
    """The correction for the sampler's own log-probs, with what stands for vLLM."""
    options = {"num_iterations": 2, "learning_rate": 0.1} | VLLM[case]
    assert_same(with_vllm(path, None, **options), with_vllm(path, {}, **options))


def rollouts_with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of which a part was written by tools."""
    g = torch.Generator().manual_seed(trainer.state.global_step)
    ids = [torch.randint(3, 30, (7,), generator=g).tolist() for _ in prompts]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-3.0] * 7 for _ in ids],
        "env_mask": [[1, 1, 0, 0, 1, 1, i % 2] for i, _ in enumerate(ids)],
    }


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "vespo"])
def test_tokens_of_tools_are_not_trained_on(path: str, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer, options = {"rollout_func": rollouts_with_tools}, OLD | {"loss_type": loss_type, "beta": 0.1}
    assert_same(grpo(path, None, trainer, **options), grpo(path, {}, trainer, **options))


class OwnLoss(GRPOTrainer):
    """A user's subclass: half of TRL's loss, and a metric."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._metrics["train"]["own"].append(7.0)
        return 0.5 * super()._compute_loss(model, inputs)


def test_a_loss_of_the_users_stays(path: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = (train(make_grpo(path, cls=OwnLoss, **OLD), parts) for parts in (None, TREE))
    assert_same(theirs, ours)
    assert ours.state.log_history[0]["own"] == 7.0
    assert type(ours).__name__ == "OwnLoss"
    assert isinstance(ours, OwnLoss)
    assert "OwnLoss has a _compute_loss of its own" in caplog.text


@pytest.mark.slow
def test_evaluation(path: str) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    trainer = {"eval_dataset": dataset().select(range(4))}
    theirs, ours = (grpo(path, parts, trainer, **options) for parts in (None, TREE))
    for log in (*theirs.state.log_history, *ours.state.log_history):
        for name in [key for key in log if key.startswith("eval_") and key.endswith(("runtime", "second"))]:
            log.pop(name)
    assert any("eval_entropy" in log for log in ours.state.log_history)
    assert_same(theirs, ours)


def test_zero_advantages(path: str) -> None:
    """Groups without a signal are in the metrics all the same."""
    trainer = {"reward_funcs": lambda completions, **_: [float(i >= 4) * (i % 3) for i in range(len(completions))]}
    assert_same(grpo(path, None, trainer, **OLD), grpo(path, TREE, trainer, **OLD))


def test_experts(tmp_path: Path) -> None:
    """The balancing loss weighs every token as often as the flat batch holds it."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2)
    ids = dict(vocab_size=30, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    config = Qwen3MoeConfig(**sizes, **heads, **ids, max_position_embeddings=128)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = {"learning_rate": 0.05, "router_aux_loss_coef": 0.5, "num_iterations": 2}
    theirs, ours = (grpo(str(tmp_path), parts, **options) for parts in (None, TREE))
    assert "aux_loss" in ours.state.log_history[0]
    assert_same(theirs, ours)


def test_the_example(tmp_path: Path) -> None:
    """Both of its trainers, on a smaller model than its own, and what it prints of their steps."""
    path = save_model(tmp_path / "model", max_position_embeddings=512)
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "trl_grpo.py"))
    model, words = example["made_model"](layers=1, width=16)
    assert model.config.vocab_size == len(words) == 32768
    assert words.decode(words("bon 0042 bonbon")["input_ids"]) == "bon 0042 bonbon"
    assert example["digits"](["1 a", "", "23"]) == [0.5, 0.0, 1.0]
    steps, logs = {}, {}
    for name in ("TRL", "rolltree"):
        args = Namespace(model=path, steps=2, prompt=4, completion=8, output=str(tmp_path / "out"))
        ours, theirs = Pipe()
        ours.send(None), ours.send(None)  # two turns
        steps[name], logs[name] = example["train"](args, name == "rolltree", theirs)
        assert [example["Step"](*ours.recv()) for _ in range(2)] == steps[name]
        assert all(min(step.rollouts, step.scoring, step.update) > 0 for step in steps[name])
        assert [log["reward"] for log in logs[name]] == [0, 0]  # its vocabulary has no digits
    made = {"TRL": [example["Step"](9, 9, 9), example["Step"](4, 1, 5)], "rolltree": [example["Step"](1, 0.5, 1)]}
    *table, factor = example["report"](made, logs).splitlines()
    assert [line.split()[:5] for line in table[1:]] == [
        ["TRL", "10.00", "4.00", "1.00", "5.00"],
        ["rolltree", "2.50", "1.00", "0.50", "1.00"],
    ]
    assert factor == "4.0 times as fast"
