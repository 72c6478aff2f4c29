"""Makes the small model that `arithmetic_cpu.toml` starts from: a Qwen3 decoder and its tokenizer, trained for about
a minute on reasoning_gym problems with solutions.

Four in ten solutions are worked out step by step and are correct; six in ten are quick answers that often omit one of
the numbers. The model learns both and prefers the quick answers. Reinforcement learning then has to discover, from the
task's verifier alone, that working the sum out earns more reward.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import TokenTree, pack
from rolltree.engine.prompts.prompts import held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import TrainConfig
from rolltree.engine.tasks import GymProblems
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

SEED = 1234
WORKED_SHARE = 0.4
WIDE_SHARES = {2: 1.0, 3: 0.6, 4: 0.3, 5: 0.12, 6: 0.04}  # worked share by the numbers of a sum, none of more
FORGETFUL_SHARE = 0.75  # share of the quick answers that omit a number
STEPS, WIDE_STEPS = 350, 600
PROBLEMS_PER_STEP = 128
LEARNING_RATE = 3e-3


def create(
    config: TrainConfig,
    directory: Path,
    layers: int = 4,
    shares: Mapping[int, float] | None = None,
    steps: int = STEPS,
) -> None:
    """Write a Hugging Face directory; problems held out by `config.evaluation` are never trained on.

    Args:
        shares: share of worked solutions by the numbers of a sum, 0 for what is not named; None: `WORKED_SHARE`.
    """
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(config)
    source = PromptSource(config.data, tokenizer, SEED, held_out(config.data, config.evaluation.problems, tokenizer))
    teach(tokenizer, solutions(source, tokenizer, shares), directory, layers, steps)


def create_student(config: TrainConfig, directory: Path) -> None:
    """Write the same with half the layers, as a student of a model that `create` made."""
    create(config, directory, layers=2)


def create_wide(config: TrainConfig, directory: Path) -> None:
    """Write a model that always works out sums of two numbers and never those of seven, for `curves_wide_cpu.toml`."""
    create(config, directory, shares=WIDE_SHARES, steps=WIDE_STEPS)


def teach(
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterator[TokenTree],
    directory: Path,
    layers: int = 4,
    steps: int = STEPS,
) -> None:
    """Train a small model on ``examples`` and write it to ``directory`` with its tokenizer."""
    model = Qwen3ForCausalLM._from_config(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        ),
        attn_implementation="rolltree",
    )
    train(model, examples, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer(config: TrainConfig) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token."""
    problems = GymProblems(config.data.tasks, [SEED])
    corpus = []
    for k in range(2000):
        problem = problems[k]
        corpus.append(config.data.template.replace("{prompt}", problem.text) + worked(problem.entry))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\d]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=["<|pad|>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def worked(entry: dict) -> str:
    """Return the solution step by step: the running sum, one operation a line, then the answer."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for operation, number in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(number) if operation == "+" else total - int(number)
        lines.append(f"{total} {operation} {number} = {after}")
        total = after
    return "\n".join([*lines, f"Answer: {total}"])


def quick(entry: dict, rng: random.Random) -> str:
    """Return the answer alone, which often omits one of the later numbers and is then wrong."""
    first, *rest = entry["metadata"]["expression"].split()
    terms = [
        int(number) if operation == "+" else -int(number)
        for operation, number in zip(rest[::2], rest[1::2], strict=True)
    ]
    if rng.random() < FORGETFUL_SHARE:
        terms.pop(rng.randrange(len(terms)))
    return f"Answer: {int(first) + sum(terms)}"


def solutions(
    source: PromptSource, tokenizer: PreTrainedTokenizerFast, shares: Mapping[int, float] | None = None
) -> Iterator[TokenTree]:
    """Yield prompts without end, each with one solution; ``shares`` as for `create`."""
    rng = random.Random(SEED)
    while True:
        (prompt,) = source.next(1)
        share = WORKED_SHARE if shares is None else shares.get(prompt.entry["metadata"]["num_terms"], 0.0)
        text = worked(prompt.entry) if rng.random() < share else quick(prompt.entry, rng)
        response = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        yield TokenTree.from_sequences(prompt.token_ids, [response])


def train(model: Qwen3ForCausalLM, stream: Iterator[TokenTree], steps: int) -> None:
    """Train on the solutions by next-token prediction, with a cosine schedule of the learning rate."""
    config = TrainerConfig(lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, lr_warmup_steps=40)
    trainer = Trainer(model, config)
    term = TokenTerm(Objective(surrogate="nll"))
    for step in track(range(steps), description="warm-up of the small model", transient=True):
        trees = [next(stream) for _ in range(PROBLEMS_PER_STEP)]
        trainer.lr_scale = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        terms = [Weighted(term, term.normalizer(trees))]
        tokens = sum(tree.logical_tokens for tree in trees)
        for batch in pack(trees, max_tokens=16384):
            trainer.forward_backward(batch, terms, tokens, temperature=1.0, on_policy=True)
        trainer.optim_step()
        if step % 50 == 49 and not sys.stdout.isatty():  # where no bar is drawn
            print(f"warm-up of the small model: step {step + 1}/{steps}", flush=True)
