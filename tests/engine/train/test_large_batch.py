"""An update's memory does not grow with its tokens, beyond the rollouts themselves."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltree.engine import TokenTree, Trainer, pack
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Weighted
from rolltree.kernels import Objective

from ...support.tiny import train_step

SCRIPT = """
import json, sys, time
import numpy as np, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from rolltree.engine import TokenTree, Trainer, pack
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Weighted
from rolltree.kernels import Objective

groups, max_tokens = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
trees = [
    TokenTree.from_sequences(
        rng.integers(0, 1024, 512).tolist(), list(rng.integers(0, 1024, (8, 192))), advantages=rng.normal(size=8)
    )
    for _ in range(groups)
]
torch.manual_seed(0)
model = Qwen3ForCausalLM(
    Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, attn_implementation="rolltree",
    )
)
trainer = Trainer(model, TrainerConfig(lr=1e-3))
batches = pack(trees, max_tokens=max_tokens)

def resident(name):  # without the files that the process maps
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return (int(fields[name].split()[0]) - int(fields["RssFile"].split()[0])) / 1024

def step():
    normalizer = float(sum(t.loss_length.sum() for t in trees))
    return update(batches, normalizer)

def update(some, normalizer):
    terms = [Weighted(TokenTerm(Objective.preset("dapo")), normalizer)]
    tokens = sum(t.logical_tokens for b in some for t in b.trees)
    for b in some:
        trainer.forward_backward(b, terms, tokens, temperature=1.0, on_policy=True)
    return trainer.optim_step()

update(pack(trees[:1], max_tokens=10_000), 1.0)  # warm
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
begin = time.perf_counter()
metrics = step()
print(json.dumps({
    "tokens": sum(t.num_tokens for t in trees), "batches": len(batches), "seconds": time.perf_counter() - begin,
    "extra_mib": resident("VmHWM") - before, "norm": float(metrics["actor/grad_norm"][0]),
}))
"""


def update(groups: int, max_tokens: int) -> dict[str, float]:
    command = [sys.executable, "-c", SCRIPT, str(groups), str(max_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result


@pytest.mark.slow
def test_a_million_tokens_take_the_memory_of_a_few() -> None:
    small, large = update(50, 8192), update(500, 8192)
    assert large["tokens"] > 1_000_000
    assert large["batches"] > 9 * small["batches"]
    assert large["extra_mib"] < 1.1 * small["extra_mib"]


def test_the_micro_batch_size_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    trees = [
        TokenTree.from_sequences(
            rng.integers(0, 97, 60).tolist(), list(rng.integers(0, 97, (8, 40))), advantages=rng.normal(size=8)
        )
        for _ in range(6)
    ]
    terms = [Weighted(TokenTerm(Objective.preset("dapo")), float(sum(t.loss_length.sum() for t in trees)))]
    torch.manual_seed(0)
    first = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, attn_implementation="rolltree",
        )
    )  # fmt: skip
    norms, batches = [], []
    for max_tokens in (400, 900, 100_000):
        trainer = Trainer(copy.deepcopy(first), TrainerConfig(lr=1e-3))
        batches.append(pack(trees, max_tokens=max_tokens))
        metrics = train_step(trainer, batches[-1], terms, temperature=1.0, on_policy=True)
        norms.append(float(metrics["actor/grad_norm"][0]))
    assert [len(some) for some in batches] == [6, 3, 1]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
