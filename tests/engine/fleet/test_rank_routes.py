"""Ranks of a mixture of experts train with the experts that the sampler recorded, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rolltree.engine.data.tree import TokenTree

from ...support.moe_models import make as make_mixture
from ...support.tiny import write_job
from .rank_runs import Case, alone, differences, of_cases, on_ranks, sampled

REPLAYED = "recorded experts, two updates"
REFERENCE = "recorded experts, fewer trees than ranks, a reference with its own"
CASES = {
    REPLAYED: Case(("--trainer.updates_per_step=2", "--trainer.max_tokens=96"), groups=7),
    REFERENCE: Case(("--roles.reference={ema=0.9}", "--algorithm.objective_options={kl_coef=0.1}"), groups=1),
}
FREE = "--model.replay_routes=false"


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("job"), model={"replay_routes": True})
    tokenizer = AutoTokenizer.from_pretrained(path.parent / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_mixture("qwen3_moe", vocab_size=len(tokenizer), tie_word_embeddings=True, **ids).save_pretrained(
        path.parent / "model"
    )
    return path


def other_experts(tree: TokenTree) -> TokenTree:
    """Return ``tree`` with experts recorded that its routers have not chosen."""
    recorded = np.asarray(tree.routes)
    tree.set("routes", np.where(recorded < 0, -1, (recorded + 1) % 8))
    return tree


@pytest.mark.slow
def test_two_ranks_train_with_the_experts_that_one_process_trains_with(toml: Path) -> None:
    steps: list[list[Any]] = [[other_experts(tree) for tree in of_step] for of_step in sampled(toml, 2, 7)]
    one = {name: alone(toml, steps, case) for name, case in CASES.items()}
    for rank in on_ranks(of_cases, toml.parent, 2, toml, steps, list(CASES), CASES):
        for name in CASES:
            assert differences(one[name], rank[name]) == {}, name
    free = alone(toml, steps, CASES[REPLAYED], FREE)
    assert any(not torch.allclose(w, one[REPLAYED].weights[name], atol=1e-4) for name, w in free.weights.items())
