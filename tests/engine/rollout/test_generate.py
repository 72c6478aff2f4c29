"""The call in the manner of Transformers, and LoRA adapters, against Transformers and peft themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import GenerationConfig

from rolltree.engine.integrations.generate import generate
from rolltree.engine.rollout import NativeEngine, SamplingParams

from ..programs.test_programs import rescored
from .test_native_engine import EOS, PROMPTS, assert_all_free, engine, model, responses


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    return ids, mask


def test_greedy_equals_transformers_with_padded_prompts() -> None:
    ids, mask = padded()
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    expected = model("qwen3").generate(ids, attention_mask=mask, **options)
    torch.testing.assert_close(generate(engine(), ids, mask, **options), expected)
    config = GenerationConfig(**options)
    torch.testing.assert_close(generate(engine(), ids, mask, config), expected)


def test_several_samples_of_each_prompt() -> None:
    ids, mask = padded()
    out = generate(engine(), ids, mask, max_new_tokens=8, do_sample=True, num_return_sequences=3, eos_token_id=EOS)
    assert out.shape == (18, ids.shape[1] + 8)
    assert len({tuple(row.tolist()) for row in out}) == 18
    torch.testing.assert_close(out[::3, : ids.shape[1]], ids)
    with pytest.raises(ValueError, match="does not support 'num_beams' = 4"):
        generate(engine(), ids, mask, max_new_tokens=8, num_beams=4)
    assert generate(engine(), ids, mask).shape[1] <= ids.shape[1] + 20


def own_model(**settings: Any) -> Any:
    """The tiny model with a generation_config of its own."""
    net = copy.deepcopy(model("qwen3"))
    net.generation_config.update(**settings)
    return net


GREEDY: list[tuple[dict[str, Any], dict[str, Any]]] = [  # the model's generation_config, and the options of the call
    ({}, {}),
    ({"max_new_tokens": 7}, {}),
    ({"max_length": 50}, {}),
    ({"max_length": 50}, {"max_new_tokens": 4}),
    ({"max_new_tokens": 5}, {"max_new_tokens": 9}),
    ({"eos_token_id": [EOS, 30, 31, 32, 33, 34]}, {"max_new_tokens": 24}),
    ({"eos_token_id": EOS}, {"max_new_tokens": 24, "eos_token_id": list(range(20, 40))}),
    ({"eos_token_id": list(range(20, 40))}, {"max_new_tokens": 12, "eos_token_id": None}),
    ({"temperature": 0.3, "top_k": 2, "top_p": 0.5, "typical_p": 0.9, "length_penalty": 0.5}, {"max_new_tokens": 6}),
    ({"do_sample": True, "top_k": 3}, {"do_sample": False, "max_new_tokens": 6}),
    (
        {},
        {"max_new_tokens": 6, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "use_cache": True},
    ),
    ({}, {"max_new_tokens": 6, "cache_implementation": "static", "disable_compile": True}),
]


@pytest.mark.slow(but=12)
@pytest.mark.check(but=6)
@pytest.mark.parametrize(("own", "options"), GREEDY)
@pytest.mark.parametrize("masked", [True, False])
def test_settings_come_from_the_call_then_the_model_then_transformers(
    own: dict[str, Any], options: dict[str, Any], masked: bool
) -> None:
    net = own_model(**{"pad_token_id": 0, "eos_token_id": EOS, **own})
    ids, mask = padded()
    expected = net.generate(ids, attention_mask=mask if masked else None, **options)
    mine = NativeEngine(net, config=engine().config)
    torch.testing.assert_close(generate(mine, ids, mask if masked else None, **options), expected)
    if None not in options.values():
        config = GenerationConfig(**options)
        torch.testing.assert_close(generate(mine, ids, mask if masked else None, config), expected)


SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"do_sample": True}),
    ({"do_sample": True, "top_k": 5}, {}),
    ({"do_sample": True, "top_k": 5}, {"top_k": 9}),
    ({"do_sample": True}, {"top_k": 0}),
    ({"do_sample": True}, {"top_k": None}),
    ({"do_sample": True, "top_k": 0, "top_p": 0.2}, {}),
    ({"do_sample": True, "top_k": 0, "min_p": 0.02}, {}),
    ({"do_sample": True, "top_k": 0, "temperature": 0.2}, {"temperature": None}),
    ({"do_sample": True, "top_k": 100_000, "temperature": 2.0}, {}),
]


@pytest.mark.check
@pytest.mark.parametrize(
    ("own", "options"),
    [pytest.param(*case, marks=() if number == 4 else pytest.mark.slow) for number, case in enumerate(SAMPLED)],
)
def test_the_first_token_is_drawn_from_the_distribution_of_transformers(
    own: dict[str, Any], options: dict[str, Any]
) -> None:
    net = own_model(pad_token_id=0, **own)
    draws = 1000
    torch.manual_seed(0)
    ids = torch.tensor([PROMPTS[3]]).repeat(draws, 1)
    theirs = net.generate(ids, max_new_tokens=1, **options)[:, -1]
    ours = generate(NativeEngine(net, config=engine().config), ids, max_new_tokens=1, **options)[:, -1]
    vocabulary = net.config.vocab_size
    p, q = (torch.bincount(x, minlength=vocabulary) / draws for x in (theirs, ours))
    # the expected distance of two samples of one distribution is 0.8 standard errors, summed over the tokens
    bound = 1.5 * (2 * p.clamp(min=1 / draws) * (1 - p) / draws).sqrt()[(p + q) > 0].sum()
    assert (p - q).abs().sum() < bound
    assert len(theirs.unique()) > 1
    assert abs(len(theirs.unique()) - len(ours.unique())) <= 0.15 * len(theirs.unique())


@pytest.mark.parametrize(
    ("own", "options", "said"),
    [
        ({"repetition_penalty": 1.05}, {}, "'repetition_penalty' = 1.05"),
        ({}, {"repetition_penalty": 1.3}, "'repetition_penalty' = 1.3"),
        ({}, {"no_repeat_ngram_size": 3}, "'no_repeat_ngram_size' = 3"),
        ({"suppress_tokens": [5]}, {}, "'suppress_tokens'"),
        ({}, {"min_new_tokens": 4}, "'min_new_tokens' = 4"),
        ({}, {"bad_words_ids": [[7]]}, "'bad_words_ids'"),
        ({}, {"do_sample": True, "typical_p": 0.5}, "'typical_p' = 0.5"),
        ({}, {"guidance_scale": 1.5}, "'guidance_scale' = 1.5"),
        ({}, {"output_scores": True, "return_dict_in_generate": True}, "'output_scores' = True"),
        ({}, {"max_time": 3.0}, "'max_time' = 3.0"),
        ({}, {"logits_processor": [len]}, "'logits_processor'"),
        ({}, {"beam_with": 3}, "'beam_with'"),
        ({}, {"do_sample": True, "temperature": 0.0}, "temperature"),
        ({}, {"max_length": 3}, "max_length is 3"),
        ({}, {"num_return_sequences": 3}, "num_return_sequences"),
    ],
)
def test_what_would_sample_otherwise_is_refused_by_name(
    own: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    ids, mask = padded()
    with pytest.raises(ValueError, match=said):
        generate(NativeEngine(own_model(**own), config=engine().config), ids, mask, **options)


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Two LoRA adapters of the tiny model that change what it says."""
    found = {}
    for i, name in enumerate(("red", "blue")):
        torch.manual_seed(i)
        modules = ["q_proj", "v_proj", "down_proj", *(["lm_head"] if name == "blue" else [])]
        config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
        peft.get_peft_model(copy.deepcopy(model("qwen3")), config).save_pretrained(tmp_path / name)
        found[name] = tmp_path / name
    return found


def test_adapters_share_a_batch_and_keep_their_keys_apart(adapters: dict[str, Path]) -> None:
    net = copy.deepcopy(model("qwen3"))
    native = NativeEngine(net, config=engine().config)
    for name, path in adapters.items():
        native.load_adapter(name, str(path))
    names = [None, "red", "blue"] * 2
    params = [SamplingParams(n=2, max_new_tokens=12, ignore_eos=True, adapter=name) for name in names]
    prompts = [PROMPTS[3]] * 3 + [PROMPTS[4]] * 3
    trees = native.generate(prompts, params, seeds=range(6))
    assert len({str(responses(tree)) for tree in trees}) == 6
    for name, tree in zip(names, trees, strict=True):
        plain = copy.deepcopy(model("qwen3"))
        judge = plain if name is None else peft.PeftModel.from_pretrained(plain, str(adapters[name]))
        judge.eval()
        assert rescored(tree, judge, 1.0, {}) < 1e-5
    again = native.generate(prompts[:1], params[:1], seeds=[0])
    assert responses(again[0]) == responses(trees[0])
    assert_all_free(native)
    with pytest.raises(ValueError, match="no adapter 'green'; load_adapter has been called for: red, blue"):
        native.generate(prompts[:1], SamplingParams(adapter="green"))
    with pytest.raises(ValueError, match="an adapter 'red' already"):
        native.load_adapter("red", str(adapters["red"]))
