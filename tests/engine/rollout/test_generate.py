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
    with pytest.raises(ValueError, match="does not know 'num_beams' = 4"):
        generate(engine(), ids, mask, max_new_tokens=8, num_beams=4)
    with pytest.raises(ValueError, match="needs max_new_tokens"):
        generate(engine(), ids, mask)


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
