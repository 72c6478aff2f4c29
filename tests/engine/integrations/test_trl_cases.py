"""Cases that TRL tests of its GRPO trainer on a CPU, with accelerated trainers: head, trees and native engine.

The cases are those of TRL's ``tests/test_grpo_trainer.py``; what is random there is a rule here. Each trains, moves
every weight, and logs what it should. A few run always, the others with ``-m slow``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from rolltree.engine.integrations.trl import accelerate

from .trl_tiny import dataset, grpo, make_grpo, reward, save_model, tokenizer, train

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if extra is defined %}q{% endif %}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


def conversations() -> Dataset:
    texts = ("abc", "what is", "q", "z")
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts] * 4})


def chat() -> Any:
    made = tokenizer()
    made.chat_template = CHAT
    return made


def nothing(completions: list[Any], **_: Any) -> list[None]:
    return [None] * len(completions)


async def later(completions: list[str], **_: Any) -> list[float]:
    return reward(completions)


def of_messages(completions: list[Any], **_: Any) -> list[float]:
    return reward([message[0]["content"] for message in completions])


def of_a_column(completions: list[str], level: list[float], **_: Any) -> list[float]:
    return [x * y for x, y in zip(reward(completions), level, strict=True)]


def telling(completions: list[str], log_extra: Any, log_metric: Any, trainer_state: Any, **_: Any) -> list[float]:
    assert trainer_state.global_step >= 0
    log_extra("first", [text[:1] for text in completions])
    log_metric("custom", 0.75)
    return reward(completions)


def reward_model() -> Any:
    torch.manual_seed(1)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return Qwen2ForSequenceClassification(
        Qwen2Config(vocab_size=30, num_key_value_heads=2, num_labels=1, pad_token_id=0, **sizes)
    )


def half_last(completions: list[str], **_: Any) -> list[float | None]:
    return [None if i % 4 == 1 else x for i, x in enumerate(reward(completions))]


MODEL = object()  # a reward model, made in the test
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
LEVELS = Dataset.from_dict({"prompt": ["abc", "b", "hello", "q"] * 4, "level": [1.0, 2.0, 3.0, 4.0] * 4})
TALK = {"train_dataset": conversations(), "reward_funcs": of_messages, "processing_class": chat()}
Case = tuple[dict[str, Any], dict[str, Any], Callable[[Any], object]]


def logs(name: str) -> Callable[[Any], object]:
    return lambda t: any(entry.get(name) is not None for entry in t.state.log_history)


def trained(t: Any) -> bool:
    return True


CASES: dict[str, Case] = {
    "plain": ({}, {}, logs("entropy")),
    "conversations": (TALK, {}, trained),
    "chat template options": (
        TALK,
        {"chat_template_kwargs": {"extra": True}},
        lambda t: t._tokenize_prompts([[{"role": "user", "content": "a"}]])[0] == [[3, 19]],
    ),
    "evaluation with groups of its own": (
        {"eval_dataset": dataset()},
        {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "eval_on_start": True},
        logs("eval_rewards/reward/mean"),
    ),
    "stream of prompts": (
        {"train_dataset": IterableDataset.from_generator(lambda: iter(dataset()))}, {"max_steps": 2}, trained,
    ),
    "iterations": ({}, {"num_iterations": 2}, logs("clip_ratio/region_mean")),
    "adapter": ({"peft_config": LORA}, {}, trained),
    "adapter and checkpointing": ({"peft_config": LORA}, {"gradient_checkpointing": True}, trained),
    "reward model": ({"reward_funcs": [MODEL]}, {}, logs("reward")),
    "two rewards": ({"reward_funcs": [reward, half_last]}, {}, logs("rewards/half_last/mean")),
    "one that never applies": ({"reward_funcs": [reward, nothing]}, {}, logs("rewards/reward/mean")),
    "weights": (
        {"reward_funcs": [reward, half_last]}, {"reward_weights": [0.7, 0.3]},
        lambda t: math.isclose(t.reward_weights.sum().item(), 1.0, rel_tol=1e-6),
    ),
    "normalized one by one": (
        {"reward_funcs": [reward, half_last]}, {"multi_objective_aggregation": "normalize_then_sum"}, trained,
    ),
    "asynchronous reward": ({"reward_funcs": [reward, later]}, {}, logs("rewards/later/mean")),
    "model and function": ({"reward_funcs": [MODEL, reward]}, {}, logs("rewards/reward/mean")),
    "column": ({"train_dataset": LEVELS, "reward_funcs": of_a_column}, {}, trained),
    "columns and metrics of a reward": (
        {"reward_funcs": telling}, {"log_completions": True},
        lambda t: "first" in t._logs["extra"] and logs("custom")(t),
    ),
    "reference": ({}, {"beta": 0.1}, logs("kl")),
    "reference kept up": ({}, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}, logs("kl")),
    "padding": ({}, {"pad_to_multiple_of": 8}, trained),
    "off-policy mask": ({}, {"off_policy_mask_threshold": 0.5}, trained),
    "sequence ratios": ({}, {"importance_sampling_level": "sequence", "loss_type": "grpo"}, trained),
    "two-sided clipping": ({}, {"delta": 2.0}, trained),
    "head in fp32": ({}, {"cast_lm_head_to_fp32": True}, trained),
    "entropy bonus": ({}, {"entropy_coef": 0.5}, logs("policy_loss")),
    "adaptive entropy": (
        {}, {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 15.0, "entropy_coef_delta": 0.005,
             "gradient_accumulation_steps": 2},
        lambda t: math.isclose(t.entropy_coef, 0.01 + 0.005 * t.state.global_step, abs_tol=1e-6),
    ),
    "entropy filter": ({}, {"top_entropy_quantile": 0.2}, trained),
    "generation": ({}, {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "temperature": 0.8}, trained),
    "more of generation": (
        {}, {"generation_kwargs": {"no_repeat_ngram_size": 4}}, lambda t: t.rolltree.rollouts is None,
    ),
    "group larger than the batch": ({}, {"num_generations": 8, "per_device_train_batch_size": 4,
                                         "gradient_accumulation_steps": 2}, trained),
    "workers": ({}, {"dataloader_num_workers": 2}, trained),
    **{f"scaled by {by}": ({}, {"scale_rewards": by}, trained) for by in (False, "group", "batch", True, "none")},
    **{f"loss {name}": ({}, {"loss_type": name}, trained)
       for name in ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
}  # fmt: skip
ALWAYS = ("plain", "conversations", "adapter", "evaluation with groups of its own", "group larger than the batch")


@pytest.mark.check(but=1)
@pytest.mark.parametrize("case", [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_case(path: str, case: str) -> None:
    trainer, options, check = CASES[case]
    if isinstance(funcs := trainer.get("reward_funcs"), list) and MODEL in funcs:
        judges = [reward_model() if f is MODEL else f for f in funcs]
        tokenizers = [tokenizer() if f is MODEL else None for f in funcs]
        trainer = trainer | {"reward_funcs": judges, "reward_processing_classes": tokenizers}
    done = grpo(path, {}, trainer, **({"max_steps": 3, "learning_rate": 0.1} | options))
    assert math.isfinite(done.state.log_history[-1]["train_loss"])
    for name, weight in done.model.named_parameters():
        if weight.requires_grad:
            assert not torch.equal(weight, done.before[name]), name
    assert check(done)


def test_all_truncated_and_masked(path: str) -> None:
    """Nothing is learned from, and nothing moves."""
    greedy = {"generation_kwargs": {"do_sample": False}}
    trainer = make_grpo(path, mask_truncated_completions=True, max_completion_length=3, **greedy)
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = [2]  # which is nowhere the likeliest
    done = train(trainer, {})
    assert done.state.log_history[0]["completions/clipped_ratio"] == 1
    assert done.state.log_history[-1]["train_loss"] == 0
    for name, weight in done.model.named_parameters():
        assert torch.equal(weight, done.before[name]), name


def test_all_rewards_none(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="trl.trainer.grpo_trainer"):
        grpo(path, {}, {"reward_funcs": nothing})
    assert "All reward functions returned None" in caplog.text


def test_an_adapter_of_ones_own(path: str) -> None:
    """A model that is wrapped already; its reference is a copy of the adapter."""
    from .test_trl_refusals import Instance

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LORA)
    done = train(make_grpo(path, {"model": model}, cls=Instance, beta=0.1, learning_rate=0.1), {})
    names = [name for name, weight in done.model.named_parameters() if weight.requires_grad]
    assert names
    assert all(not torch.equal(done.model.get_parameter(name), done.before[name]) for name in names)
    assert any("kl" in entry for entry in done.state.log_history)


@pytest.mark.slow
def test_resumed(path: str, tmp_path: Path) -> None:
    """A checkpoint goes on where it stopped, samples included."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = grpo(path, {}, **options)
    again = accelerate(make_grpo(path, **options))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    own = dict(again.model.named_parameters())
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(own[name], weight)
