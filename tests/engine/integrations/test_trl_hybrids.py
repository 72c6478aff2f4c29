"""GRPO of hybrids through TRL's trainer, with and without `accelerate`: recurrent layers on trees and in rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rolltree.engine.batches.recurrence import Recurrence
from rolltree.engine.integrations.trl import accelerate

from ...support.recurrent_models import make
from .trl_tiny import assert_same, grpo, make_grpo, tokenizer

TREE = {"rollouts": False}
OLD = {"num_iterations": 2, "learning_rate": 0.1, "beta": 0.2, "gradient_checkpointing": True}
GREEDY = {"generation_kwargs": {"do_sample": False}}
EVERY = [pytest.param(f, marks=() if f == "qwen3_5" else pytest.mark.slow) for f in ("qwen3_5", "nemotron_h", "lfm2")]


def saved(directory: Path, family: str) -> str:
    ids = dict(vocab_size=30, eos_token_id=1, pad_token_id=0)
    make(family, **ids).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.mark.check
@pytest.mark.parametrize("family", EVERY)
def test_trees_train_what_trl_trains(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, family)
    theirs = grpo(path, None, **OLD)
    asked: list[int] = []
    initial = Recurrence.initial

    def counting(self: Recurrence, layer: int, *args: Any) -> Any:
        asked.append(layer)
        return initial(self, layer, *args)

    monkeypatch.setattr(Recurrence, "initial", counting)
    assert_same(theirs, grpo(path, TREE, **OLD), 1e-4)
    assert asked, "no layer took the tree's path"


@pytest.mark.parametrize("family", EVERY)
def test_completions_are_those_of_generate_and_their_log_probs_the_trainers(family: str, tmp_path: Path) -> None:
    path = saved(tmp_path, family)
    theirs, ours = make_grpo(path, **GREEDY), accelerate(make_grpo(path, **GREEDY))
    texts = ("abc de", "hello world", "q")
    prompts = [ids for text in texts for ids in theirs._tokenizer([text] * 4)["input_ids"]]
    want, _ = theirs._generate_single_turn(prompts, None, {}, 4)
    got, _ = ours._generate_single_turn(prompts, None, {}, 4)
    assert got == want
    ours = accelerate(make_grpo(path))
    batch = ours._generate_and_score_completions([{"prompt": p} for p in ("abc de", "hello world") for _ in range(4)])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logprob, _, _ = ours._get_per_token_logps_and_entropies(ours.model, ids, mask, batch["completion_ids"].shape[1])
    live = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["sampling_per_token_logps"][live], logprob[live], atol=5e-5, rtol=1e-5)
