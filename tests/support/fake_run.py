"""Writes the directory of a run that never happened: plausible curves and arithmetic trees, always the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CONFIG = """name = "fake-arithmetic"
seed = 0

[model]
path = "models/small"

[[data.tasks]]
name = "chain_sum"

[rollout]
program = "treepo"
n = 8

[algorithm]
objective = "dapo"

[trainer]
steps = {steps}

[evaluation]
problems = 512
"""

PARTS = {
    "gen": 0.9,
    "reward": 0.12,
    "pack": 0.03,
    "old_log_prob": 0.0,
    "forward_backward": 0.45,
    "head": 0.2,
    "optimizer": 0.1,
    "dump_rollout_generations": 0.02,
    "other": 0.02,
}


def write_fake_run(run_dir: Path, *, steps: int = 120, trees_per_step: int = 6, save_every: int = 10) -> Path:
    """A finished run under ``run_dir``, which is created."""
    rng = np.random.default_rng(7)
    (run_dir / "rollouts").mkdir(parents=True)
    (run_dir / "config.toml").write_text(CONFIG.format(steps=steps))
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            print(json.dumps(metrics(step, steps, rng)), file=file)
    for step in range(1, steps + 1):
        if step % save_every == 0 or step == 1:
            rows = [row for index in range(trees_per_step) for row in tree_rows(step, index, step / steps, rng)]
            pq.write_table(pa.Table.from_pylist(rows), run_dir / "rollouts" / f"step_{step:06d}.parquet")
    write_tokenizer(run_dir / "export")
    return run_dir


def metrics(step: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    """One line of metrics.jsonl; step 0 is the evaluation before training."""
    done = step / steps
    noise = rng.normal
    accuracy = 0.31 + 0.44 * (1 - np.exp(-3.2 * done)) + noise(0, 0.008)
    if step == 0:
        return {"step": 0, "eval/accuracy": accuracy, "timing_s/eval": 3.1, "timing_s/step": 3.1}
    timing = {f"timing_s/{part}": seconds * (1 + 0.08 * noise()) for part, seconds in PARTS.items() if seconds}
    timing["timing_s/gen"] *= 1.4 - 0.4 * done
    out: dict[str, float] = {
        "step": step,
        "reward/mean": 0.28 + 0.45 * (1 - np.exp(-3.0 * done)) + noise(0, 0.025),
        "actor/entropy": 0.62 * np.exp(-1.1 * done) + noise(0, 0.012),
        "actor/pg_loss": noise(0.01, 0.006),
        "actor/grad_norm": abs(0.35 - 0.15 * done + noise(0, 0.05)),
        "actor/pg_clipfrac": abs(0.006 + noise(0, 0.003)),
        "response_length/mean": 24 - 3 * done + noise(0, 0.6),
        "response_length/clip_ratio": max(0.0, 0.09 * (1 - done) + noise(0, 0.008)),
        "perf/throughput": 14200 + 900 * noise(),
        "perf/flop_sampled": 2.1e9,
        "perf/flop_scored": 0.0,
        "perf/flop_trained": 3.3e9,
        "perf/flop_evaluated": 1e9,
        "perf/flop_so_far": 5.4e9 * step,
        "perf/unique_tokens_per_s": 8700 + 500 * noise(),
        "tree/token_ratio": 1.55 + 0.15 * done + noise(0, 0.03),
        "training/rollout_probs_diff_mean": abs(2e-6 + noise(0, 4e-7)),
        "filter/zero_variance_groups": float(rng.poisson(4 + 8 * done)),
    }
    if step % 30 == 0:
        out["eval/accuracy"] = accuracy
        timing["timing_s/eval"] = 3.0 + 0.1 * noise()
    if step % 50 == 0:
        timing["timing_s/checkpoint"] = 0.4
    return out | timing | {"timing_s/step": sum(timing.values())}


def tree_rows(
    step: int, index: int, skill: float, rng: np.random.Generator, *, leaves: int = 8
) -> list[dict[str, Any]]:
    """Leaves of a tree of depth two (a worked line, then an answer); tokens are characters."""
    a, b, c = rng.integers(2, 99, 3)
    prompt = f"What is {a} + {b} - {c}?\n"
    answer = str(a + b - c)
    texts: list[tuple[str, str, str]] = []
    for leaf in range(leaves):
        half = leaf * 2 // leaves
        start = f"{a} + {b} = {a + b + (0 if half == 0 or skill > 0.5 else 1)}\n"
        quarter = "then" if leaf % 4 < 2 else "so"
        right = rng.random() < 0.2 + 0.7 * skill
        ending = f" it is {answer if right else a + b - c + int(rng.integers(1, 9))}.<eos>"
        texts.append((start, quarter, ending))
    nodes: dict[tuple[str, ...], int] = {}
    drawn: dict[tuple[str, ...], list[float]] = {}
    rewards = np.array([float(f" {answer}." in t[2]) for t in texts])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    rows = []
    for leaf, parts in enumerate(texts):
        ids: list[int] = []
        node_ids: list[int] = []
        logprob: list[float] = []
        entropy: list[float] = []
        for depth, part in enumerate(parts):
            key = (*parts[: depth + 1], str(leaf)) if depth == 2 else parts[: depth + 1]
            node = nodes.setdefault(key, len(nodes) + 1)
            tokens = tokenize(part)
            values = drawn.setdefault(key, list(-rng.gamma(0.25, 1.0, len(tokens))))
            ids += tokens
            node_ids += [node] * len(tokens)
            logprob += values
            entropy += [float(min(2.0, -v * 0.8)) for v in values]
        rows.append(
            {
                "step": step,
                "prompt_id": f"chain_sum-{step * 100 + index}",
                "task": "chain_sum",
                "leaf": leaf,
                "prompt_text": prompt,
                "response_text": "".join(parts).replace("<eos>", ""),
                "response_ids": ids,
                "node_ids": node_ids,
                "behaviour_logprob": logprob,
                "entropy": entropy,
                "loss_mask": [True] * len(ids),
                "policy_version": [step - 1] * len(ids),
                "advantage": float(advantages[leaf]),
                "reward": float(rewards[leaf]),
                "status": "stop",
            }
        )
    return rows


ALPHABET = [chr(c) for c in range(32, 127)] + ["\n"]


def tokenize(text: str) -> list[int]:
    """Ids of the tokenizer that :func:`write_tokenizer` writes: a character each, and <eos> as one token."""
    head, eos, _ = text.partition("<eos>")
    return [ALPHABET.index(c) for c in head] + ([len(ALPHABET)] if eos else [])


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    vocabulary = {c: i for i, c in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "<eos>": len(vocabulary)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
