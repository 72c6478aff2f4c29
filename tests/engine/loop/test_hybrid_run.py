"""A whole run of a hybrid: the native engine samples from the recurrent layers that are trained on trees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rolltree.engine.app.cli import main
from rolltree.engine.rollout.native.cache.states import StateCache

from ...support.recurrent_models import make
from ...support.tiny import write_job


def train(directory: Path, *options: str) -> list[dict[str, Any]]:
    """Train two steps with a page pool so small that branches are preempted; return the rows of the metrics."""
    toml = write_job(
        directory, trainer={"steps": 2}, rollout={"kv_tokens": 256, "kept_states": 4}, evaluation={"problems": 1}
    )
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make("qwen3_5", vocab_size=len(tokenizer), **ids).save_pretrained(directory / "model")
    assert main(["train", str(toml), *options]) == 0
    rows = (directory / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if "training/rollout_probs_diff_mean" in row]


@pytest.mark.slow
@pytest.mark.usefixtures("without_report")
def test_sampler_and_trainer_agree_on_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = train(tmp_path / "right")
    assert len(rows) == 2
    assert all(row["training/rollout_probs_diff_mean"] < 1e-6 for row in rows)
    assert all(row["tree/token_ratio"] > 1 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)

    compose = StateCache.compose

    def forgetting(self: StateCache, *args: Any) -> Any:
        step = compose(self, *args)
        return step._replace(read=np.zeros_like(step.read))

    monkeypatch.setattr(StateCache, "compose", forgetting)
    assert any(row["training/rollout_probs_diff_mean"] > 1e-4 for row in train(tmp_path / "wrong"))
