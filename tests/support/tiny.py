"""A tiny random model and a configuration that runs in seconds, for tests of whole runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltree.engine.app.config import load_config
from rolltree.engine.batches.batch import TreeBatch
from rolltree.engine.train.trainer import Metrics, Trainer, Weighted

ROOT = Path(__file__).parents[2]


def train_step(trainer: Trainer, batches: Sequence[TreeBatch], terms: Sequence[Weighted], **given: Any) -> Metrics:
    """Make one update of ``batches``."""
    tokens = sum(tree.logical_tokens for batch in batches for tree in batch.trees)
    for batch in batches:
        trainer.forward_backward(batch, terms, tokens, **given)
    return trainer.optim_step()


REWARD = """
def judge(text, entry):
    return float(len(text) % 3 == 0)  # any rule that a random model meets now and then
"""

CONFIG = """
name = "tiny"
output_dir = "{directory}/runs"

[model]
path = "{directory}/model"

[data]
template = "{{prompt}}\\n"
tasks = [{{ name = "chain_sum", options = {{ min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 1 }} }}]
max_prompt_tokens = 64

[rollout]
program = "treepo"
program_options = {{ segment_tokens = 3, init = 2 }}
n = 4
max_new_tokens = 10
kv_tokens = 4096

[reward]
verifier = "reward.py:judge"
workers = 1

[algorithm]
objective = "dapo"
advantage = "tree_path_mean"

[trainer]
steps = 6
prompts_per_step = 6
lr = 1e-3
max_tokens = 256

[evaluation]
problems = 8
every = 3

[checkpoint]
every = 2
"""


def write_run(directory: Path) -> Path:
    """Model, reward and configuration in ``directory``; the configuration's path."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import arithmetic_warmup
    finally:
        sys.path.pop(0)
    (directory / "reward.py").write_text(REWARD)
    toml = directory / "tiny.toml"
    toml.write_text(CONFIG.format(directory=directory))
    tokenizer = arithmetic_warmup.make_tokenizer(load_config(toml))
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    return toml


def write_job(directory: Path, mine: str, judges: str = "") -> Path:
    """Write a run with a user's parts in ``mine.py``, further verifiers in ``reward.py``, and six demonstrations in
    ``given.jsonl``; return its TOML. Verifiers have a file of their own, as their process imports it: where it imports
    rolltree.engine, each run starts three seconds later."""
    path = write_run(directory)
    (directory / "mine.py").write_text(mine)
    (directory / "reward.py").write_text(REWARD + judges)
    rows = [{"prompt": f"{a} + 2 =", "response": f"Answer: {a + 2}"} for a in range(6)]
    (directory / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
