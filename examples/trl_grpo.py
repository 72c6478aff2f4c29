"""Compares TRL's GRPO with and without `accelerate(trainer)` on the same job, without a download.

    python examples/trl_grpo.py                    # a model of 12 layers with random weights, made here
    python examples/trl_grpo.py --model MODEL      # a Hugging Face directory or name
    python examples/trl_grpo.py --steps 40         # enough steps to see it learn

Each trainer has a process of its own, and they take turns step by step, so a busy machine slows both alike. Prompts,
seeds and options are the same; those not named below are TRL's defaults: weights in fp32, bf16 autocast, gradient
checkpointing, no KL term. Each samples by itself, so rewards agree as those of two seeds do. Even random weights learn
this task: the reward is the share of digits in a completion.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from rolltree.engine.integrations.trl import accelerate

WORDS = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("n", "r", "s", "l", "m", "st", "nd", "th")]
NUMBERS = [f"{n:04d}" for n in range(8000)]
VOCABULARY = 32768
PHASES = ("rollouts", "scoring", "update")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face directory or name (default: one with random weights)")
    parser.add_argument("--steps", type=int, default=5, help="updates of each run (5)")
    parser.add_argument("--prompt", type=int, default=384, help="words of a prompt (384)")
    parser.add_argument("--completion", type=int, default=64, help="tokens of a completion (64)")
    parser.add_argument("--output", default="runs/trl_grpo", help="where TRL writes (runs/trl_grpo)")
    return parser.parse_args()


def made_model(layers: int = 12, width: int = 384) -> tuple[Any, Any]:
    """Return a Qwen3 with random weights, and a tokenizer of numbers and made-up words."""
    pairs = [a + b for a in WORDS for b in WORDS]
    tokens = ["<pad>", "<eos>", "<unk>", *NUMBERS, *WORDS, *pairs][:VOCABULARY]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def made_prompt(generator: random.Random, words: int) -> str:
    return " ".join([*generator.choices(WORDS, k=words), "Write digits, as many as you can."])


def digits(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of digits among its characters other than blanks."""
    texts = ["".join(text.split()) for text in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


@dataclass
class Step:
    """Where the seconds of one step went; scoring is rewards and the log-probs that the options ask for."""

    rollouts: float = 0.0
    scoring: float = 0.0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        return self.rollouts + self.scoring + self.update


class Clock(TrainerCallback):
    """Times the steps of a trainer, and waits for its turn before each if there is a pipe."""

    def __init__(self, trainer: Any, turns: Connection | None) -> None:
        self.steps: list[Step] = []
        self.turns, self.spent = turns, {"sampling": 0.0, "preparing": 0.0}
        trainer._generate = self.timed("sampling", trainer._generate)
        trainer._prepare_inputs = self.timed("preparing", trainer._prepare_inputs)
        trainer.add_callback(self)

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[name] += time.perf_counter() - begun

        return call

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.turns is not None:
            self.turns.recv()
        self.begun, self.spent = time.perf_counter(), dict.fromkeys(self.spent, 0.0)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        whole, sampling, preparing = time.perf_counter() - self.begun, *self.spent.values()
        self.steps.append(Step(sampling, preparing - sampling, whole - preparing))
        if self.turns is not None:
            self.turns.send(astuple(self.steps[-1]))


def train(args: argparse.Namespace, accelerated: bool, turns: Connection | None = None) -> tuple[list[Step], list[Any]]:
    """Train, and return the steps' times and what TRL logged of each."""
    set_seed(0)
    if args.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = made_model()
    texts = random.Random(0)
    trainer = GRPOTrainer(
        model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=args.output,
            num_generations=8,
            per_device_train_batch_size=8,
            max_completion_length=args.completion,
            max_steps=args.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"prompt": [" ".join(texts.choices(WORDS, k=args.prompt)) for _ in range(64)]}),
        processing_class=tokenizer,
    )
    if accelerated:
        accelerate(trainer)  # the only line that differs
    trainer.remove_callback(PrinterCallback)
    clock = Clock(trainer, turns)
    trainer.train()
    return clock.steps, [log for log in trainer.state.log_history if "reward" in log]


def take_turns(args: argparse.Namespace, accelerated: bool, turns: Connection) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # Transformers' and TRL's, about each other
    turns.send(train(args, accelerated, turns)[1])


def report(steps: dict[str, list[Step]], logs: dict[str, list[Any]]) -> str:
    """Return a table of where a step's time went (the first, which compiles, is left out), rewards, and the factor."""
    lines = [
        f"{'seconds a step':16}{'whole':>9}" + "".join(f"{phase:>11}" for phase in PHASES) + "   reward of each step"
    ]
    whole = {}
    for name, taken in steps.items():
        known = taken[1:] or taken
        whole[name] = statistics.median(step.seconds for step in known)
        parts = "".join(f"{statistics.median(getattr(step, phase) for step in known):11.2f}" for phase in PHASES)
        lines.append(f"{name:16}{whole[name]:9.2f}{parts}   " + " ".join(f"{log['reward']:.2f}" for log in logs[name]))
    return "\n".join([*lines, f"{whole['TRL'] / whole['rolltree']:.1f} times as fast"])


def main() -> None:
    args = arguments()
    context = multiprocessing.get_context("spawn")
    turns: dict[str, Connection] = {}
    for name in ("TRL", "rolltree"):
        turns[name], end = context.Pipe()
        context.Process(target=take_turns, args=(args, name == "rolltree", end), daemon=True).start()
        end.close()
    steps: dict[str, list[Step]] = {name: [] for name in turns}
    try:
        for number in range(1, args.steps + 1):
            for name, pipe in turns.items():
                pipe.send(None)
                steps[name].append(Step(*pipe.recv()))
            last = ", ".join(f"{name} {taken[-1].seconds:.2f} s" for name, taken in steps.items())
            print(f"step {number} of {args.steps}: {last}", flush=True)
        logs = {name: pipe.recv() for name, pipe in turns.items()}
    except (EOFError, ConnectionError):
        raise SystemExit("A trainer's process ended early; its error is above.") from None
    print(report(steps, logs))


if __name__ == "__main__":
    main()
