"""Layers with single passes between their products sample what layers as they are sample, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.fused_layers import FusedLayers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen2 with a window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=12, max_window_layers=1)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that ran fused."""
    made: list[int] = []
    forward = FusedLayers._forward

    def counted(self: FusedLayers, layer: Any, number: int, *rest: Any) -> Any:
        made.append(number)
        return forward(self, layer, number, *rest)

    monkeypatch.setattr(FusedLayers, "_forward", counted)
    return made


def sample(model: Any, **config: Any) -> list[Any]:
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=2048, max_prefill_tokens=16, **config))
    prompts = np.random.default_rng(0).integers(97, size=(3, 25)).tolist()
    trees = engine.generate(prompts, SamplingParams(n=5, max_new_tokens=20, ignore_eos=True))
    return [(tree.token_id.tolist(), tree.behaviour_logprob.tobytes()) for tree in trees]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, calls: list[int]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # norms that are not all ones, biases that are not zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    plain = sample(model, debug=True)  # also compares every layer's attention with the reference
    assert not calls
    assert sample(model) == plain
    assert sorted(set(calls)) == [0, 1, 2]


def test_what_is_not_known_runs_as_it_is(calls: list[int]) -> None:
    torch.manual_seed(0)
    mistral = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)).eval()
    sample(mistral)
    low = MODELS["qwen3"]().to(torch.bfloat16).eval()
    sample(low)
    with torch.autocast("cpu", torch.bfloat16):  # as trainers sample
        sample(MODELS["qwen3"]().eval())
    listened = MODELS["qwen3"]().eval()
    heard: list[int] = []
    for layer in listened.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, out: heard.append(len(out)))
    sample(listened)
    assert heard
    assert not calls


def test_the_trainers_calls_stay_its_own(calls: list[int]) -> None:
    model = MODELS["qwen3"]().eval()
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=256))
    layers = engine.loop.runner._layers
    ids = torch.arange(9)[None]
    expected = model(ids).logits
    assert isinstance(layers, FusedLayers)
    with layers.substituted():
        assert torch.equal(model(ids).logits, expected)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    assert not calls
