"""A tiny random model and a configuration that runs in seconds, for tests of whole runs.

`write_job` writes them into a folder, `tiny_job` makes a fixture of that for the tests of a file, and `beside` writes
the same configuration with other keys.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

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

GIVEN = [{"prompt": f"{a} + 2 =", "response": f"Answer: {a + 2}"} for a in range(6)]
"""Rows of a file of demonstrations."""
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "output_dir": "FOLDER/runs",
    "model": {"path": "FOLDER/model"},
    "data": {
        "template": "{prompt}\n",
        "tasks": [
            {"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
        ],
        "max_prompt_tokens": 64,
    },
    "rollout": {
        "program": "treepo",
        "program_options": {"segment_tokens": 3, "init": 2},
        "n": 4,
        "max_new_tokens": 10,
        "kv_tokens": 4096,
    },
    "reward": {"verifier": "reward.py:judge", "workers": 1},
    "algorithm": {"objective": "dapo", "advantage": "tree_path_mean"},
    "trainer": {"steps": 6, "prompts_per_step": 6, "lr": 1e-3, "max_tokens": 256},
    "evaluation": {"problems": 8, "every": 3},
    "checkpoint": {"every": 2},
}
NO_METHOD: dict[str, Any] = {
    "rollout": {"program": None, "program_options": None},
    "algorithm": {"objective": None, "advantage": None},
}
"""Tables of a job that leaves its method to a recipe."""


def write_job(folder: Path, files: Mapping[str, Any] | None = None, **tables: Any) -> Path:
    """Write model, verifier and the configuration of a run of a few seconds into ``folder``; return its ``tiny.toml``.

    Args:
        files: further files by their names; rows are written as lines of JSON. Verifiers have a file of their own, as
            their process imports it: where it imports rolltree.engine, each run starts three seconds later.
        tables: keys of `CONFIG` by their tables, that replace or join those there; None takes one away. The word FOLDER
            in a value stands for ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({"reward.py": REWARD} | dict(files or {})).items():
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (folder / name).write_text(text)
    _write_model(_write(folder / "tiny.toml", CONFIG))
    return _write(folder / "tiny.toml", _changed(CONFIG, tables))


def tiny_job(files: Mapping[str, Any] | None = None, **tables: Any) -> Any:
    """Return a fixture: the TOML of `write_job`, in a folder that the tests of one file share."""

    @pytest.fixture(scope="module")
    def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_job(tmp_path_factory.mktemp("job"), files, **tables)

    return toml


def write_other(toml: Path) -> None:
    """Write into the folder ``other`` beside ``toml`` a model of the same shape with other weights, a teacher say."""
    folder = toml.parent / "other"
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(toml.parent / "model")).save_pretrained(folder)
    for file in (toml.parent / "model").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def beside(toml: Path, name: str, **tables: Any) -> Path:
    """Write ``NAME.toml`` beside ``toml``, with other keys as `write_job` takes them; return its path."""
    return _write(toml.with_name(f"{name}.toml"), _changed(tomllib.loads(toml.read_text()), tables))


def as_toml(value: Any) -> str:
    """Return a value as it stands in one line of TOML, or in a flag."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _changed(config: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name, table in tables.items():
        found[name] = found.get(name, {}) | table if isinstance(table, dict) else table
    return {
        name: {key: v for key, v in table.items() if v is not None} if isinstance(table, dict) else table
        for name, table in found.items()
        if table is not None
    }


def _write(path: Path, config: Mapping[str, Any]) -> Path:
    lines = [f"{key} = {as_toml(value)}" for key, value in config.items() if not isinstance(value, dict)]
    for name, table in config.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{key} = {as_toml(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines).replace("FOLDER", str(path.parent)) + "\n")
    return path


def _write_model(toml: Path) -> None:
    """Write a random model, and a tokenizer of the texts of the run's tasks, beside ``toml``."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import arithmetic_warmup
    finally:
        sys.path.pop(0)
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
    model.save_pretrained(toml.parent / "model")
    tokenizer.save_pretrained(toml.parent / "model")
