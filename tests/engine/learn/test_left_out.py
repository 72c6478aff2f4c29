"""Ends of responses that the policy was sure of: what is left out, and how much of the gradient that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, load_config, pack
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.batches.cost import Work
from rolltree.engine.learn.left_out import Cutting
from rolltree.engine.learn.live import Live
from rolltree.engine.learn.utilization import Compute
from rolltree.engine.record.metrics import Sums
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.group import ALONE
from rolltree.engine.train.terms import TokenTerm, without_certain_ends
from rolltree.engine.train.trainer import Trainer, Weighted
from rolltree.kernels import Objective

from ...support.tiny import tiny_job
from ..train.test_trainer import make_model

toml = tiny_job(
    rollout={"program": "flat", "program_options": None, "temperature": 0.05},
    algorithm={"objective": "dr_grpo", "advantage": "group_norm"},
    trainer={"steps": 2, "prompts_per_step": 3},
    evaluation={"problems": 0, "every": 0},
    checkpoint={"every": 10},
)


def made(*probabilities: list[float], prompt: int = 2) -> TokenTree:
    """A tree whose responses were sampled with ``probabilities``."""
    responses = [[10 * i + t for t in range(len(p))] for i, p in enumerate(probabilities, start=1)]
    tree = TokenTree.from_sequences(list(range(prompt)), responses)
    logprob = np.full(tree.num_tokens, np.nan, np.float32)
    for leaf, p in enumerate(probabilities):
        logprob[tree.response_rows(leaf)] = np.log(np.array(p, np.float32))
    tree.set("behaviour_logprob", logprob)
    tree.advantage[:] = np.where(np.arange(tree.num_leaves) % 2 == 0, 1.0, -0.5)
    return tree


def ids(tree: TokenTree) -> list[list[int]]:
    return [tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]


def test_what_follows_the_last_uncertain_token_is_left_out() -> None:
    tree = made([0.5, 0.99, 0.9, 0.98, 1.0], [0.99, 0.999], [1.0, 0.2], [0.99, np.nan, 1.0])
    (part,) = without_certain_ends([tree], [TokenTerm(Objective())], 0.97)
    assert ids(part) == [[10, 11, 12], [30, 31], [40, 41]]
    (all_of_it,) = without_certain_ends([tree], [TokenTerm(Objective()), TokenTerm(Objective(), "b")], 0.97)
    assert all_of_it is tree
    assert without_certain_ends([made([1.0], [0.99])], [TokenTerm(Objective())], 0.97) == []


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_the_measured_share_is_that_of_the_gradients(aggregation: Any) -> None:
    """The whole gradient and the one without ends are each computed by themselves."""
    model = make_model()
    tree = made([0.5, 0.6, 0.99, 0.98], [0.3, 0.99, 0.9, 0.99, 1.0], prompt=3)
    term = TokenTerm(Objective(aggregation=aggregation), length_limit=8)
    term.prepare([tree])
    trainer = Trainer(model, TrainerConfig())
    weighted = [Weighted(term, term.normalizer([tree]))]
    given = {"temperature": 1.0, "on_policy": True}

    def gradient(trees: list[TokenTree]) -> torch.Tensor:
        for batch in pack(trees, max_tokens=64):
            trainer.forward_backward(batch, weighted, tree.logical_tokens, **given)
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        trainer.drop_gradients()
        return flat

    class Packing:
        group, work, again = ALONE, Work(), Work()

        def shared(self, tree: TokenTree, terms: Any) -> TokenTree:
            return tree

        def packed(self, trees: list[TokenTree], terms: Any) -> Any:
            return pack(trees, max_tokens=64)

    sums = Sums()
    cut = Cutting(0.97, Packing(), trainer, Compute(None))  # type: ignore[arg-type]
    live = Live([tree], ALONE, narrow=None, cut=cut.of(weighted), share=lambda tree: tree, demonstrations=0)
    cut.describe(live, weighted, [term], 1, sums, **given)
    assert ids(live[0]) == [[10, 11], [20, 21, 22]]
    whole, left = gradient([tree]), gradient(list(live))
    measured = sums.means()
    assert measured["filter/cut_gradient"] == pytest.approx(float((whole - left).norm() / whole.norm()), rel=1e-4)
    assert measured["filter/cut_ratio"] == pytest.approx(4 / 9)
    assert all(p.grad is None for p in model.parameters())
    cut.describe(live, weighted, [term], 2, other := Sums(), **given)
    assert "filter/cut_gradient" not in other.means()


def rows(toml: Path, folder: Path, *flags: str) -> list[dict[str, float]]:
    run = build(load_config(toml, [f"--output_dir={folder}", *flags]), console=Console())
    run.run()
    return run.log.rows()[1:]


@pytest.mark.check
def test_a_run_computes_less_and_says_what_it_lost(toml: Path, tmp_path: Path) -> None:
    whole = rows(toml, tmp_path / "whole")
    cut = rows(toml, tmp_path / "cut", "--algorithm.cut=0.97")
    assert cut[0]["perf/flop_sampled"] == whole[0]["perf/flop_sampled"]
    assert 0 < cut[0]["filter/cut_ratio"] < 1
    assert 0 < cut[0]["filter/cut_gradient"] < 1
    assert "filter/cut_gradient" not in cut[1]
    assert not [name for row in whole for name in row if name.startswith("filter/cut")]
    assert cut[0]["filter/unseen_tokens"] > whole[0]["filter/unseen_tokens"]
    assert cut[1]["perf/flop_trained"] < whole[1]["perf/flop_trained"]
