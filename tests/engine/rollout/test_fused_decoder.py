"""Fused layers sample what layers as they are sample: to the last bit but for their products, to rounding with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, fuse_layers
from rolltree.engine.rollout.native.adapters import RowAdapters
from rolltree.engine.rollout.native.fused_decoder import FusedDecoder
from rolltree.kernels.decoder_layer import Decoder

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
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each step True if the decoder ran fused."""
    ran: list[bool] = []
    run = FusedDecoder.run

    def counted(self: FusedDecoder, *ids: Any) -> Any:
        hidden = run(self, *ids)
        ran.append(hidden is not None)
        return hidden

    monkeypatch.setattr(FusedDecoder, "run", counted)
    return ran


def sample(model: Any, **config: Any) -> list[tuple[list[int], bytes]]:
    """Tokens, and the bits of their log-probs."""
    engine = NativeEngine(model, config=EngineConfig(**{"kv_tokens": 2048, "max_prefill_tokens": 16, **config}))
    prompts = np.random.default_rng(0).integers(97, size=(3, 25)).tolist()
    trees = engine.generate(prompts, SamplingParams(n=5, max_new_tokens=20, ignore_eos=True))
    return [(tree.token_id.tolist(), tree.behaviour_logprob.tobytes()) for tree in trees]


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # norms that are not all ones, biases that are not zero
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


class Linear(nn.Linear):
    """Stands for what an adapter puts in the place of a product."""


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the steps whose decoder was one call."""
    rows: list[int] = []
    run = Decoder.run

    def counted(self: Decoder, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(len(input_ids))
        return run(self, input_ids, *args)

    monkeypatch.setattr(Decoder, "run", counted)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_the_same_samples(name: str, calls: list[bool], whole: list[int]) -> None:
    model = made(name)
    plain = sample(model, debug=True)  # also compares every layer's attention with the reference
    assert not calls
    fused = sample(model)
    assert all(calls)
    assert len(whole) == len(calls) > 0
    for (tokens, bits), (same, others) in zip(plain, fused, strict=True):
        assert tokens == same
        np.testing.assert_allclose(
            np.frombuffer(bits, np.float32), np.frombuffer(others, np.float32), rtol=2e-5, atol=2e-6
        )


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_in_bf16_are_the_modules_own(name: str, whole: list[int]) -> None:
    """As near as bf16 is to fp32: an operation that rounded less or more often would be off as far."""
    model = made(name, torch.bfloat16)
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=2048))
    (tree,) = engine.generate([[5, 3, 8]], SamplingParams(n=6, max_new_tokens=20, ignore_eos=True))
    assert whole
    rows = [tree.response_rows(leaf) for leaf in range(tree.num_leaves)]
    sampled = [tree.token_id[some].tolist() for some in rows]
    fused = np.concatenate([tree.behaviour_logprob[some] for some in rows])

    def of_modules(model: Any) -> Any:
        scorer = NativeEngine(model, config=EngineConfig(kv_tokens=2048, debug=True))
        return np.concatenate(scorer.score([[5, 3, 8]], [sampled])[0])

    plain, wide = of_modules(model), of_modules(made(name, torch.bfloat16).float())
    assert 0 < np.abs(wide - plain).mean() < 0.1
    assert np.abs(fused - plain).mean() <= np.abs(wide - plain).mean()


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_where_the_products_are_the_layers_own(
    name: str, dtype: torch.dtype, calls: list[bool], whole: list[int]
) -> None:
    model = made(name, dtype)
    plain = sample(model, debug=True)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Linear
    assert sample(model) == plain
    assert calls
    assert all(calls)
    assert not whole


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_the_same_in_any_batch(name: str, dtype: torch.dtype) -> None:
    """If rows are few, no bit of a response or of a prompt in pieces depends on what else is in the step."""
    model = made(name, dtype)
    alone = sample(model, max_batch_rows=1, max_prefill_tokens=5)
    assert sample(model, max_batch_rows=4) == alone
    assert sample(model, max_batch_rows=15, max_prefill_tokens=40) == alone


def test_a_model_whose_layers_are_fused_for_training_is_sampled_from_as_before(
    calls: list[bool], whole: list[int]
) -> None:
    model = made("qwen3")
    plain = sample(model)
    steps = len(whole)
    assert sample(fuse_layers(model)) == plain
    assert all(calls)
    assert len(whole) == 2 * steps


def test_weights_that_come_and_go_are_seen(whole: list[int]) -> None:
    model = made("llama")
    before = sample(model)
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=2048))
    params = SamplingParams(n=1, max_new_tokens=8, ignore_eos=True)
    (first,) = engine.generate([[1, 2, 3]], params, seeds=[7])
    layer = model.model.layers[1].mlp
    kept, layer.up_proj.weight = layer.up_proj.weight, nn.Parameter(-layer.up_proj.weight.detach())
    engine.update_weights()
    (second,) = engine.generate([[1, 2, 3]], params, seeds=[7])
    assert not np.array_equal(first.behaviour_logprob, second.behaviour_logprob, equal_nan=True)
    layer.up_proj.weight = kept
    engine.update_weights()
    (third,) = engine.generate([[1, 2, 3]], params, seeds=[7])
    assert np.array_equal(first.behaviour_logprob, third.behaviour_logprob, equal_nan=True)
    assert sample(model) == before
    assert whole


def test_what_is_not_known_runs_as_it_is(calls: list[bool]) -> None:
    torch.manual_seed(0)
    sample(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=12)).eval())
    sample(MODELS["qwen3"]().to(torch.float16).eval())
    mixed = made("qwen3", torch.bfloat16)
    mixed.model.norm.float()
    sample(mixed)
    with torch.autocast("cpu", torch.bfloat16):  # as trainers sample
        sample(MODELS["qwen3"]().eval())
    listened = MODELS["qwen3"]().eval()
    heard: list[int] = []
    for layer in listened.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, out: heard.append(len(out)))
    sample(listened)
    assert heard
    assert calls
    assert not any(calls)


def test_weights_that_come_to_lie_otherwise_are_seen(calls: list[bool]) -> None:
    """Kernels read them row by row; a column-major one has the same numbers under the same parameter."""
    model = made("llama")
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=2048))
    params = SamplingParams(n=1, max_new_tokens=8, ignore_eos=True)
    (first,) = engine.generate([[1, 2, 3]], params, seeds=[7])
    assert all(calls)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T
    engine.update_weights()
    calls.clear()
    (second,) = engine.generate([[1, 2, 3]], params, seeds=[7])
    assert calls
    assert not any(calls)
    assert first.token_id.tolist() == second.token_id.tolist()
    np.testing.assert_allclose(first.behaviour_logprob, second.behaviour_logprob, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "dynamic"])
def test_positions_are_turned_as_the_model_turns_them(rope: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10000.0}
    if rope != "default":
        parameters |= {"factor": 2.0, "original_max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters))
    rotary, like, tokens = model.model.rotary_emb, torch.zeros(4, SIZES["hidden_size"]), torch.zeros(4).int()
    fused = FusedDecoder(model.model, None, RowAdapters(model))  # type: ignore[arg-type]

    def check(*positions: int) -> None:
        ids = torch.tensor(positions)
        expected = rotary(like[None], ids[None])
        *found, turns = fused._turns(tokens, ids.int(), max(positions) + 1)
        assert (turns is None) == (rope == "dynamic")
        for table, of_model in zip(found, expected, strict=True):
            assert torch.equal(table if turns is None else table[turns], of_model[0])

    with torch.no_grad():
        check(0, 7, 3, 3)
        check(200, 1, 16, 15)
        check(500, 499, 511, 0)  # beyond max_position_embeddings, which changes a dynamic one
        check(5, 6, 7, 8)
        if rope != "dynamic":
            rotary.inv_freq *= 0.9
            check(5, 6, 7, 8)
            rotary.inv_freq = rotary.inv_freq * 0.9
            check(5, 6, 7, 8)
            rotary.attention_scaling = 1.25
            check(5, 6, 7, 8)


def test_a_rotary_module_of_ones_own_is_asked_every_time() -> None:
    class Drifting(nn.Module):
        """Turns by something else at each call; knows nothing of Transformers' attributes."""

        calls = 0

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls += 1
            turns = (position_ids[..., None] * self.calls).expand(*position_ids.shape, 12).to(x.dtype)
            return turns, -turns

    model, ids = LlamaForCausalLM(LlamaConfig(**SIZES)), torch.arange(4, dtype=torch.int32)
    fused = FusedDecoder(model.model, None, RowAdapters(model))  # type: ignore[arg-type]
    with torch.no_grad():
        seen: list[int] = []
        handle = model.model.rotary_emb.register_forward_hook(lambda *_: seen.append(1))
        fused._turns(ids, ids, 4)
        fused._turns(ids, ids, 4)
        assert len(seen) == 2  # a hook hears of every step
        handle.remove()
        model.model.rotary_emb = Drifting()
        assert [int(fused._turns(ids, ids, 4)[0][1, 0]) for _ in range(2)] == [1, 2]
