"""Compares TRL's GRPO with and without `accelerate(trainer)` on the same job, in a minute and without a download.

    python examples/trl_grpo.py                    # a small model with random weights
    python examples/trl_grpo.py --model MODEL      # a Hugging Face directory or name
    python examples/trl_grpo.py --steps 100        # enough steps to see it learn

Even random weights learn this task: the reward is the share of digits in a completion.
"""

from __future__ import annotations

import argparse
import statistics
import string
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from rolltree.engine.integrations.trl import accelerate


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face directory or name (default: a small one, made here)")
    parser.add_argument("--steps", type=int, default=10, help="updates of each run (10)")
    parser.add_argument("--output", default="runs/trl_grpo", help="where TRL writes (runs/trl_grpo)")
    return parser.parse_args()


def small_model() -> tuple[Any, Any]:
    letters = {c: i for i, c in enumerate(("<pad>", "<eos>", "<unk>", *string.printable))}
    characters = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = Qwen3Config(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: its share of digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class Clock(TrainerCallback):
    """Records the times at which steps end."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the median seconds of a step; the first, which compiles, is left out if there are others."""
        steps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(steps[1:] or steps)


def train(args: argparse.Namespace, accelerated: bool) -> tuple[float, float]:
    """Train and return the seconds per step and the mean reward of the last three steps."""
    set_seed(0)
    if args.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = small_model()
    clock = Clock()
    trainer = GRPOTrainer(
        model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=args.output,
            num_generations=8,
            per_device_train_batch_size=8,
            max_completion_length=48,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"Write digits, as many as you can. {n:03d} " * 6 for n in range(64)]}
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    if accelerated:
        accelerate(trainer)  # the only line that differs
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return clock.seconds(), statistics.mean(rewards[-3:])


def main() -> None:
    args = arguments()
    found = {name: train(args, name == "rolltree") for name in ("TRL", "rolltree")}
    for name, (seconds, reward) in found.items():
        print(f"{name}: {seconds:.2f} s a step, reward {reward:.2f} in the last steps")
    print(f"{found['TRL'][0] / found['rolltree'][0]:.1f} times as fast")


if __name__ == "__main__":
    main()
