"""GRPO in one file of plain PyTorch: sample groups, judge them, train on the packed trees. Two CPU cores are enough.

    python examples/grpo_from_scratch.py                     # the small model of arithmetic_cpu.toml, made on first use
    python examples/grpo_from_scratch.py --model DIRECTORY   # any Hugging Face decoder that can add

rolltree adds four calls to a training loop of your own: `NativeEngine.generate` samples with the same parameters that
are trained, `TokenTree` holds a group and stores its prompt once, `pack` concatenates trees to a batch, and
`batch_loss` computes the loss from hidden states. Everything else here is PyTorch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import reasoning_gym
import torch

from rolltree.engine import (
    EngineConfig,
    NativeEngine,
    SamplingParams,
    TokenTree,
    batch_loss,
    load_config,
    load_model,
    load_tokenizer,
    pack,
    share_equal_prefixes,
)
from rolltree.kernels import Objective

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: the one of arithmetic_cpu.toml)")
    parser.add_argument("--steps", type=int, default=60, help="updates (60)")
    parser.add_argument("--prompts", type=int, default=64, help="groups an update (64)")
    parser.add_argument("--group", type=int, default=8, help="responses a prompt (8)")
    parser.add_argument("--lr", type=float, default=4e-5, help="learning rate of AdamW (4e-5)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a packed micro-batch (8192)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def small_model() -> Path:
    """Return the model that arithmetic_cpu.toml starts from; the first call makes it, in about a minute."""
    config = load_config(HERE / "arithmetic_cpu.toml")
    directory = Path(config.model.path)
    if not (directory / "config.json").is_file():
        import arithmetic_warmup

        arithmetic_warmup.create(config, directory)
    return directory


def problems(seed: int, count: int) -> list[dict]:
    return list(
        reasoning_gym.create_dataset(
            "chain_sum", seed=seed, size=count, min_terms=3, max_terms=4, min_digits=1, max_digits=1
        )
    )


def reward(text: str, problem: dict) -> float:
    """Return 1 if the text after the last "Answer:" is the correct answer, else 0."""
    return float(text.rpartition("Answer:")[2].strip() == problem["answer"])


class Sampler:
    """Samples responses to problems and returns one judged tree for each problem."""

    def __init__(self, model: torch.nn.Module, tokenizer) -> None:
        self.engine = NativeEngine(model, tokenizer, EngineConfig(kv_tokens=65536))
        self.tokenizer = tokenizer

    def __call__(self, some: list[dict], n: int, temperature: float, seed: int) -> list[TokenTree]:
        prompts = [self.tokenizer(f"{p['question']}\n")["input_ids"] for p in some]
        params = SamplingParams(n=n, temperature=temperature, max_new_tokens=48, seed=seed)
        trees = self.engine.generate(prompts, params)
        for tree, problem in zip(trees, some, strict=True):
            texts = [self.tokenizer.decode(s.response, skip_special_tokens=True) for s in tree.flatten()]
            tree.rewards["reward"] = np.array([reward(text, problem) for text in texts], np.float32)
        return trees


def group_advantages(tree: TokenTree) -> None:
    """Set each response's advantage to (R - mean) / std over the group (DeepSeekMath, arXiv 2402.03300, 4.1.2)."""
    rewards = tree.rewards["reward"]
    tree.set("advantage", (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    directory = args.model or small_model()
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    sample = Sampler(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    objective = Objective.preset("dapo")
    train, held_out = problems(args.seed + 1, args.steps * args.prompts), problems(10**6, 256)

    def accuracy() -> float:
        return float(np.mean([tree.rewards["reward"].mean() for tree in sample(held_out, 1, 0.0, 0)]))

    print(f"held-out accuracy before: {accuracy():.1%}")
    for step in range(args.steps):
        began = time.perf_counter()
        trees = sample(train[step * args.prompts :][: args.prompts], args.group, 1.0, step)
        for tree in trees:
            group_advantages(tree)
        mean = np.mean([tree.rewards["reward"].mean() for tree in trees])
        learnable = [tree for tree in trees if tree.advantage.any()]  # equal rewards give no gradient
        normalizer = sum(int(tree.loss_length.sum()) for tree in learnable)  # tokens of the whole update
        shared = [share_equal_prefixes(tree) for tree in learnable]  # equal prefixes of siblings are computed once
        for batch in pack(shared, max_tokens=args.tokens):
            # one update on fresh samples: the ratio is 1, so log-probs of an old policy are not needed
            batch_loss(model, batch, objective, normalizer=normalizer, old_logprob=None).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sample.engine.update_weights()  # the engine shares the tensors, but its cached keys are outdated
        print(f"step {step}: reward {mean:.3f}, {time.perf_counter() - began:.2f} s")
    print(f"held-out accuracy after: {accuracy():.1%}")


if __name__ == "__main__":
    main()
