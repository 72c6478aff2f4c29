"""The decoder of steps that a GPU replays, in Triton's interpreter: samples, and the nodes of a step's graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.fused_decoder import FusedDecoder, most_positions
from rolltree.kernels import use_backend

from ...kernels.on_device import needs_interpreter
from ...support.launches import launches
from .test_fused_decoder import MODELS, SIZES, made
from .test_graphs import Uncaptured

pytestmark = needs_interpreter


def replaying(model: Any, *, fused: bool, window: int = 1, **sizes: Any) -> NativeEngine:
    """An engine whose steps run as on a GPU, but are not captured."""
    native = NativeEngine(model, config=EngineConfig(**{"kv_tokens": 2048, "window": window, **sizes}))
    runner = native.loop.runner
    runner._fused = None
    if fused:
        runner._replayed = FusedDecoder(
            runner._decoder, native.cache, runner._adapters, most_positions(model, native.cache)
        )
    runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"), window=window)
    return native


def sampled(native: NativeEngine, tokens: int = 5) -> list[Any]:
    params = SamplingParams(n=3, max_new_tokens=tokens, ignore_eos=True)
    return native.generate([list(range(20, 31))], params, seeds=[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_samples_as_modules(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In windows of steps too; log-probs as near as roundings of the dtype are."""
    ran: list[Any] = []
    run = FusedDecoder.run

    def seen(*step: Any) -> Any:
        ran.append(run(*step))
        return ran[-1]

    monkeypatch.setattr(FusedDecoder, "run", seen)
    model = made(name, dtype)
    with use_backend("triton"):
        cases = ((False, 1), (True, 1), (True, 4))
        expected, trees, windows = (sampled(replaying(model, fused=on, window=window)) for on, window in cases)
    assert len(ran) == 2 * 4
    assert all(hidden is not None for hidden in ran)
    near = 2e-5 if dtype == torch.float32 else 0.3
    for tree, other, windowed in zip(trees, expected, windows, strict=True):
        assert windowed.token_id.tolist() == tree.token_id.tolist()
        assert windowed.behaviour_logprob.tobytes() == tree.behaviour_logprob.tobytes()
        if dtype == torch.float32:
            assert tree.token_id.tolist() == other.token_id.tolist()
            np.testing.assert_allclose(tree.behaviour_logprob, other.behaviour_logprob, rtol=0, atol=near)


@pytest.mark.slow
def test_rotations_of_later_positions_are_those_of_the_first_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the table that it was captured with."""
    model = made("llama")
    native = replaying(model, fused=True)
    with use_backend("triton"):
        sampled(native, tokens=2)
        replayed: Any = native.loop.runner._replayed
        table = replayed._table[1]
        assert len(table) == 256 == most_positions(model, native.cache)
        sampled(native, tokens=4)
        assert replayed._table[1] is table
    small = replaying(model, fused=True, kv_tokens=64)
    assert most_positions(model, small.cache) == 64


@pytest.mark.slow
def test_rows_with_adapters_and_unknown_decoders_run_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    model = Other(LlamaConfig(**SIZES)).eval()
    model.model.layers[0].mlp.register_forward_hook(lambda module, rows, out: out)
    native = replaying(model, fused=True)
    with use_backend("triton"):
        trees = sampled(native, tokens=2)
    assert all(np.isfinite(tree.behaviour_logprob).sum() for tree in trees)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("window", [1, 8])
def test_a_step_of_28_layers_has_at_most_320_nodes(name: str, window: int) -> None:
    """Counted on 3 layers: ten for each, and the embedding, the last norm, the head, the sampler and the end."""
    model, nodes = made(name), []
    native = replaying(model, fused=True, window=window)
    graphs: Any = native.loop.runner.graphs
    run = graphs.run

    def counted(vector: Any, filters: Any) -> Any:
        decoded: list[Any] = []
        nodes.append(launches(lambda: decoded.append(run(vector, filters))))
        return decoded[0]

    graphs.run = counted
    with use_backend("triton"):
        sampled(native, tokens=3)
    layers = len(model.model.layers)
    assert len(nodes) == 2
    for names in nodes[1:]:  # the first one makes the table of rotations, before a graph is captured
        outside = len(names) - 10 * layers
        assert 28 * 10 + outside <= 320
        assert outside <= 12, names
