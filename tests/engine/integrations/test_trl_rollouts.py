"""Completions of the native engine inside TRL's trainers: what they are, and what the trainer does with them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig
from trl import GRPOTrainer

from rolltree.engine.integrations import generate
from rolltree.engine.integrations.trl import accelerate
from rolltree.engine.integrations.trl.rollouts import sampling_params

from .trl_tiny import assert_same, grpo, make_grpo, save_model, train

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


FOLLOWED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5), "top_k": (2, "top_k", 2), "top_p": (0.5, "top_p", 0.5),
    "min_p": (0.3, "min_p", 0.3), "max_new_tokens": (3, "max_new_tokens", 3), "do_sample": (False, "temperature", 0.0),
}  # fmt: skip
"""Options that the native engine has: a value, and the parameter of the engine that it becomes."""
LEFT: dict[str, Any] = {
    "repetition_penalty": 5.0, "forced_eos_token_id": 0, "forced_bos_token_id": 0, "suppress_tokens": [7],
    "begin_suppress_tokens": [7], "bad_words_ids": [[7]], "min_new_tokens": 2, "min_length": 9, "typical_p": 0.5,
    "no_repeat_ngram_size": 2, "num_beams": 2, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5, "max_time": 0.5,
    "exponential_decay_length_penalty": (1, 1.1), "sequence_bias": [[[7], -9.0]], "guidance_scale": 2.0,
    "encoder_repetition_penalty": 2.0, "remove_invalid_values": True, "eos_token_id": [1, 5], "top_p": 0.0,
    "num_return_sequences": 2, "stop_strings": ["b"], "max_new_tokens": None, "temperature": 0.0, "dola_layers": "low",
    "constraints": ["x"], "force_words_ids": [[7]], "diversity_penalty": 1.0, "num_beam_groups": 2,
    "penalty_alpha": 0.5, "encoder_no_repeat_ngram_size": 2, "token_healing": True,
    "watermarking_config": WatermarkingConfig(),
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_attentions": True,
    "output_hidden_states": True,
}  # fmt: skip
"""Options for which TRL samples."""
OF_TRL = {"temperature", "top_k", "top_p", "max_new_tokens", "do_sample", "eos_token_id", "repetition_penalty"}
"""Options that TRL sets, so that the model's own are not read."""


@pytest.mark.parametrize("place", ["trainer", "model"])
def test_every_option_of_the_generation_is_followed_or_left_to_trl(
    path: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Options that are set after `accelerate`; the model's are those that the trainer's leave at None."""
    trainer = accelerate(make_grpo(path))
    stock = sampling_params(trainer)
    config = (trainer if place == "trainer" else trainer.model).generation_config
    for name, value in [*((name, value) for name, (value, *_) in FOLLOWED.items()), *LEFT.items()]:
        left = name in LEFT and value == LEFT[name]
        caplog.clear()
        trainer.rolltree.said.clear()
        before = getattr(config, name)
        setattr(config, name, value)
        params = trainer.rolltree.sampling(trainer)
        setattr(config, name, before)
        if place == "model" and name in OF_TRL:
            assert params == stock, name
        elif left:
            assert params is None, name
            assert "Completions are TRL's, not the native engine's: " in caplog.text, name
        else:
            assert getattr(params, FOLLOWED[name][1]) == FOLLOWED[name][2], name
            assert "rolltree" not in caplog.text, name
    read = generate.READ | generate.WITHOUT_EFFECT
    assert set(vars(GenerationConfig())) == FOLLOWED.keys() | LEFT.keys() | read


@pytest.mark.parametrize("tools", [False, True])
def test_completions_beyond_the_models_positions_are_trls(
    path: str, tools: bool, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = make(path, None, **GREEDY), make(path, {}, **GREEDY)
    ours.tools = [print] if tools else []
    long = [[5, 6, 7] * 41] * 2  # 123 of 128 positions, and completions of 8 tokens
    want, _ = theirs._generate_single_turn(long, None, {}, 2)
    got, logprobs = ours._generate_single_turn(long, None, {}, 2)
    assert got == want
    assert (logprobs is None) != tools  # earlier turns of the loop have log-probs, so these have NaN
    assert "may exceed the model's 128 positions" in caplog.text
    again, logprobs = ours._generate_single_turn(prompts(ours), None, {}, 4)
    assert logprobs is not None
    assert again == theirs._generate_single_turn(prompts(theirs), None, {}, 4)[0]


def test_a_method_after_the_sampler_gets_no_log_probs(path: str) -> None:
    """TRL's sampler gives None for them, and a subclass's method after it may count on that."""

    class Own(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            ids, completions, mask, texts, logprobs, *others = super()._generate(prompts)
            assert logprobs is None
            return ids, completions, mask, texts, logprobs, *others

    train(make_grpo(path, cls=Own), {})
