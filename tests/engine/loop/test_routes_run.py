"""A whole run of a mixture of experts that trains with the experts of its sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rolltree.engine.app.cli import main
from rolltree.engine.batches.pack import pack
from rolltree.engine.model.decoder import unchecked_logprob
from rolltree.engine.model.roles import Role
from rolltree.engine.model.routes import Record, install
from rolltree.engine.train.config import TrainerConfig
from rolltree.engine.train.critic import Critic

from ...support.moe_models import make, trees_with_routes
from ...support.tiny import write_job


def train(directory: Path, overrides: dict[str, str]) -> list[dict[str, Any]]:
    """Train two steps; return the rows of the metrics."""
    toml = write_job(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make("qwen3_moe", vocab_size=len(tokenizer), **ids).save_pretrained(directory / "model")
    options = {"trainer.steps": "2", "evaluation.problems": "1", "model.replay_routes": "true", **overrides}
    assert main(["train", str(toml), *(word for key, value in options.items() for word in (f"--{key}", value))]) == 0
    rows = (directory / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if "training/rollout_probs_diff_mean" in row]


def odd(self: Record, place: int, own: Tensor) -> Tensor:
    """Let the sampler use the experts after those that its routers choose."""
    chosen = (own + 1) % 8
    self._chosen[place] = chosen
    return chosen


@pytest.mark.check
@pytest.mark.usefixtures("without_report")
def test_the_trainer_uses_the_experts_of_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "choose", odd)
    options = {"trainer.updates_per_step": "2", "algorithm.old_logprob": "recompute", "rollout.kv_tokens": "256"}
    rows = train(tmp_path, options)
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_mean"] < 1e-6 for row in rows)
    assert all(row["training/unknown_routes"] == 0 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    (file, *_) = sorted((tmp_path / "runs" / "tiny" / "rollouts").glob("*.parquet"))
    table = pq.read_table(file, columns=["prompt_routes", "response_ids", "routes"]).to_pylist()
    assert all(len(row["routes"]) == len(row["response_ids"]) for row in table)
    assert all(np.array(row["prompt_routes"]).min() >= 0 for row in table)


def test_a_dense_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = ["train", str(write_job(tmp_path)), "--model.replay_routes", "true"]
    assert main(replay) == 2
    assert "'Qwen3ForCausalLM' has no mixture of experts; set model.replay_routes = false." in capsys.readouterr().err


def test_a_critic_routes_by_itself() -> None:
    model = make("qwen3_moe")
    critic = Critic(model, TrainerConfig())
    torch.nn.init.normal_(model.value_head.weight)
    trees = trees_with_routes(*install(model))
    found = []
    for replay in (True, False):
        for tree in trees:
            tree.set("origin", 1)
        critic.score(trees, pack(trees, max_tokens=4096, replay_routes=replay))
        found.append(np.concatenate([tree.value[tree.prompt_length :] for tree in trees]))
    np.testing.assert_allclose(*found, atol=1e-5)
    assert found[0].std() > 0.1


@pytest.mark.parametrize("replays", [False, True])
def test_a_reference_routes_by_itself_and_the_policy_before_an_update_does_not(replays: bool) -> None:
    model = make("qwen3_moe")
    trees = trees_with_routes(*install(model))
    for tree in trees:
        tree.set("origin", 1)
    routed, free = (pack(trees, max_tokens=4096, replay_routes=on) for on in (True, False))
    Role("ref_logprob", model, replays_routes=replays).score(trees, routed, temperature=1.0)
    (expected,) = (unchecked_logprob(model, batch).logprob.detach().numpy() for batch in (routed if replays else free))
    found = np.concatenate([tree.ref_logprob[tree.prompt_length :] for tree in trees])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (other,) = (unchecked_logprob(model, batch).logprob.detach().numpy() for batch in (free if replays else routed))
    assert np.abs(found - other).max() > 0.1
