"""A tiny model, tokenizer and dataset, and runs of TRL's trainers on them, with and without `accelerate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("trl", reason="TRL is not installed: pip install rolltree[trl]")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rolltree.engine.integrations.trl import accelerate

PROMPTS = ["abc de", "hello world", "q", "some text that is longer"]
WHOLE = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}  # not of the computation


def tokenizer() -> PreTrainedTokenizerFast:
    letters = {chr(97 + i): 3 + i for i in range(26)}
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **letters, " ": 29}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_model(directory: Path, **config: Any) -> str:
    """A Qwen3 of 30 tokens with its tokenizer; the path of its directory."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None)
    given = {**sizes, **ids, "vocab_size": 30, "num_key_value_heads": 1, "max_position_embeddings": 128, **config}
    model = Qwen3ForCausalLM(Qwen3Config(**given))
    with torch.no_grad():  # far from uniform, so that entropies and ratios differ from token to token
        model.lm_head.weight.mul_(8)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS * 4})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return rewards of the text and of the completion's place, so that equal ones of a group differ too."""
    return [len(set(text)) + float(i % 3) for i, text in enumerate(completions)]


def arguments(directory: Path, **options: Any) -> dict[str, Any]:
    """Return a configuration that computes in fp32 on the CPU; SGD, so that weights are as close as gradients are."""
    defaults = dict(
        output_dir=str(directory / "out"), per_device_train_batch_size=8, max_steps=2, learning_rate=0.05, optim="sgd",
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False,
    )  # fmt: skip
    return defaults | options


def train(trainer: Any, parts: dict[str, bool] | None) -> Any:
    """The trainer when it has trained, accelerated with ``parts`` unless that is None."""
    if parts is not None:
        assert accelerate(trainer, **parts) is trainer
    trainer.before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    return trainer


def make_grpo(
    path: str, trainer: dict[str, Any] | None = None, cls: type[GRPOTrainer] = GRPOTrainer, **options: Any
) -> Any:
    """A `GRPOTrainer` of the model in ``path``, ``trainer`` its arguments and ``options`` its configuration."""
    given = dict(num_generations=4, max_completion_length=8) | options
    config = GRPOConfig(**arguments(Path(path), **given))
    return cls(path, **(dict(reward_funcs=reward, train_dataset=dataset()) | (trainer or {})), args=config)


def grpo(path: str, parts: dict[str, bool] | None, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    """One that has trained, accelerated with ``parts`` unless that is None."""
    return train(make_grpo(path, trainer, **options), parts)


def assert_same(theirs: Any, ours: Any, tolerance: float = 2e-5, *, moves: bool = True) -> None:
    """Every number that was logged, and every weight; training must have moved these, unless it cannot."""
    assert len(theirs.state.log_history) == len(ours.state.log_history) > 1
    for a, b in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - WHOLE:
            if a[name] is None or b[name] is None:
                assert a[name] is b[name], name
                continue
            assert math.isclose(a[name], b[name], rel_tol=tolerance, abs_tol=tolerance), (name, a[name], b[name])
    own = dict(ours.model.named_parameters())
    moved = 0.0
    for name, weight in theirs.model.named_parameters():
        if weight.requires_grad:
            moved += float((weight.detach() - theirs.before[name]).abs().max())
            weight, mine = weight.detach(), own[name].detach()
            assert (weight - mine).abs().max() <= tolerance * max(float(weight.abs().max()), 0.1), name
    assert not moves or moved > 1e-3  # otherwise nothing was compared
