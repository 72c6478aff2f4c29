"""Completions of the native engine inside TRL's trainers: what they are, and what the trainer does with them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from rolltree.engine.integrations.trl import accelerate

from .trl_tiny import assert_same, grpo, make_grpo, save_model

GREEDY = {"generation_kwargs": {"do_sample": False}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("trl"))


def make(path: str, parts: dict[str, bool] | None, **options: Any) -> Any:
    trainer = make_grpo(path, **options)
    return trainer if parts is None else accelerate(trainer, **parts)


def prompts(trainer: Any) -> list[list[int]]:
    return [ids for text in ("abc de", "hello world", "q") for ids in trainer._tokenizer([text] * 4)["input_ids"]]


def test_greedy_runs_are_the_same(path: str) -> None:
    """Advantages of equal completions cancel, so the weights stay; what is logged of completions is compared."""
    options = GREEDY | {"num_iterations": 2, "beta": 0.1}
    theirs, ours = grpo(path, None, **options), grpo(path, {}, **options)
    assert_same(theirs, ours, moves=False)
    assert list(theirs._logs["completion"]) == list(ours._logs["completion"])


def test_greedy_tokens_are_those_of_generate(path: str) -> None:
    theirs, ours = make(path, None, **GREEDY), make(path, {}, **GREEDY)
    want, _ = theirs._generate_single_turn(prompts(theirs), None, {}, 4)
    got, logprobs = ours._generate_single_turn(prompts(ours), None, {}, 4)
    assert got == want
    assert [len(some) for some in logprobs] == [len(ids) for ids in got]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}], ids=["plain", "temperature"])
def test_behaviour_logprobs_are_the_trainers(path: str, options: dict[str, Any]) -> None:
    ours = make(path, {}, **options)
    batch = ours._generate_and_score_completions([{"prompt": p} for p in ("abc de", "hello world") for _ in range(4)])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logprob, _, _ = ours._get_per_token_logps_and_entropies(ours.model, ids, mask, batch["completion_ids"].shape[1])
    live = batch["completion_mask"].bool()
    assert live.sum() > 20
    torch.testing.assert_close(batch["sampling_per_token_logps"][live], logprob[live], atol=2e-5, rtol=1e-5)


def test_seeds_are_the_trainers(path: str) -> None:
    ours = make(path, {})
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(ours._generate_single_turn(prompts(ours), None, {}, 4))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    first = runs[0][0]
    assert len({tuple(ids) for ids in first[:4]}) > 1  # completions of one prompt are samples of their own


def test_samples_follow_top_k_and_end_at_eos(path: str) -> None:
    ours = make(path, {}, top_k=3)
    torch.manual_seed(0)
    completions, _ = ours._generate_single_turn([[5, 6, 7]] * 400, None, {}, 400)
    first = Counter(ids[0] for ids in completions)
    with torch.no_grad():
        p = ours.model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    likeliest = p.topk(3)
    assert set(first) <= set(likeliest.indices.tolist())
    expected = likeliest.values / likeliest.values.sum() * 400
    for token, count in zip(likeliest.indices.tolist(), expected.tolist(), strict=True):
        assert abs(first[token] - count) < 4 * count**0.5  # four standard deviations, of a fixed seed
    for ids in completions:
        assert len(ids) <= 8
        assert 1 not in ids[:-1]


def test_new_weights_are_sampled_from(path: str) -> None:
    ours = make(path, {}, **GREEDY)
    before, _ = ours._generate_single_turn(prompts(ours), None, {}, 4)
    with torch.no_grad():
        for weight in ours.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    theirs = make(path, None, **GREEDY)
    theirs.model.load_state_dict(ours.model.state_dict())
    want, _ = theirs._generate_single_turn(prompts(theirs), None, {}, 4)
    after, _ = ours._generate_single_turn(prompts(ours), None, {}, 4)
    assert after == want != before
