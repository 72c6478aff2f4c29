"""Steps compiled, and padded for CUDA graphs: the numbers are those of the steps themselves. Replays need a GPU."""

from __future__ import annotations

import copy
import functools
import gc
import re
import types
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.assembly import Step
from rolltree.engine.rollout.native.compiled import Decoded, DecodeGraphs, _bucket
from rolltree.engine.rollout.native.draws import Draws

from .test_native_engine import MODELS, PROMPTS, TREEPO, assert_all_free, engine, model, responses


class Uncaptured(DecodeGraphs):
    """Pads as the graphs do, and computes at once."""

    steps = 0

    def decode(self, step: Step, draws: Draws, adapter: Any) -> Decoded:
        self.steps += 1
        vector = self.pad(step, draws, _bucket(len(step.input_ids), 8), 1024, adapter)
        assert (vector.plan.page_indptr.diff() >= 0).all()
        for _ in range(step.steps):
            decoded = self.run(vector, draws.filters)
        return decoded


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [{}, {"kv_tokens": 120}])
def test_padding_changes_nothing(name: str, sizes: dict[str, int]) -> None:
    params = SamplingParams(n=5, max_new_tokens=20)
    expected = engine(name).generate(PROMPTS, params, TREEPO)
    native = engine(name, **sizes)
    runner = native.loop.runner
    runner.graphs = Uncaptured(native.cache, runner.decode_logits, torch.device("cpu"))
    trees = native.generate(PROMPTS, params, TREEPO)
    assert runner.graphs.steps > 0
    assert [responses(tree) for tree in trees] == [responses(tree) for tree in expected]
    for tree, other in zip(trees, expected, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(tree.behaviour_logprob),
            torch.from_numpy(other.behaviour_logprob),
            rtol=1e-6,
            atol=1e-6,
            equal_nan=True,
        )
    assert_all_free(native)


def test_padded_steps_take_the_parameters_of_each_row() -> None:
    """Rows of different filters, temperatures and biases in one step."""
    kinds: list[dict[str, Any]] = [{"top_k": 7}, {"top_p": 0.7, "temperature": 1.3}, {"min_p": 0.1}, {"temperature": 0}]
    kinds += [{"logit_bias": {5: 4.0}, "top_k": 30}, {"top_logprobs": 2, "top_p": 0.8, "kept_tokens": True}]
    params = [SamplingParams(n=2, max_new_tokens=12, **kind) for kind in kinds]
    padded, plain = engine(), engine()
    runner = padded.loop.runner
    runner.graphs = Uncaptured(padded.cache, runner.decode_logits, torch.device("cpu"))
    requests = padded.submit(PROMPTS, params), plain.submit(PROMPTS, params)
    for native, some in zip((padded, plain), requests, strict=True):
        while not all(request.done for request in some):
            native.step()
    assert runner.graphs.steps > 0
    for found, expected in zip(*requests, strict=True):
        for ours, theirs in zip(found.completions(), expected.completions(), strict=True):
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            for name in ("logprobs", "raw_logprobs", "entropies"):
                np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=1e-6)
            assert [list(top) for top in ours.top] == [list(top) for top in theirs.top]
            assert (ours.kept is None) == (theirs.kept is None)
            for kept, wanted in zip(ours.kept or (), theirs.kept or (), strict=True):
                np.testing.assert_array_equal(kept, wanted)


def assert_same(native: NativeEngine, other: NativeEngine, prompts: Any, params: SamplingParams, program: Any) -> None:
    trees, expected = (e.generate(prompts, params, program) for e in (native, other))
    assert [responses(tree) for tree in trees] == [responses(tree) for tree in expected]
    for tree, wanted in zip(trees, expected, strict=True):
        np.testing.assert_allclose(tree.behaviour_logprob, wanted.behaviour_logprob, rtol=1e-6, atol=1e-6)


def deeper(name: str) -> Any:
    config = copy.deepcopy(model(name).config)
    config.num_hidden_layers = 5
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 3)[:5]
    torch.manual_seed(1)
    return type(model(name))(config).eval()


def programs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_compiled_once_for_all_layers_and_sizes() -> None:
    """Tokens, log-probs; other sizes, a single row among them, and a deeper model compile nothing."""
    config = EngineConfig(page_size=4, kv_tokens=4096, compile=True)
    compiled = NativeEngine(model("qwen3"), config=config)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    cases: list[tuple[list[list[int]], int, Any]] = [
        (PROMPTS, 5, TREEPO),
        (PROMPTS[2:5], 3, "flat"),
        (PROMPTS[:1], 1, "flat"),
        (PROMPTS[3:4], 2, "flat"),
        (PROMPTS * 4, 4, TREEPO),
    ]
    for i, (prompts, n, program) in enumerate(cases):
        params = SamplingParams(n=n, max_new_tokens=20)
        if i:
            assert_same(compiled, engine(), prompts, params, program)
            continue
        _, sources = run_and_get_code(assert_same, compiled, engine(), prompts, params, program)
        fused = re.findall(r"cpp_fused\w+", "".join(sources))
        assert any("_neg_" in name and "index_copy" in name for name in fused), "rotary and the write of keys"
    assert_all_free(compiled)
    other = deeper("qwen3")
    assert_same(
        NativeEngine(other, config=config), NativeEngine(other), PROMPTS[:1], SamplingParams(max_new_tokens=5), "flat"
    )
    assert programs() == 1
    layers = compiled.model.get_decoder().layers
    assert all(layer._compiled_call_impl is None for layer in layers), "the trainer's calls are its own"


@pytest.mark.slow
def test_kinds_of_layers_are_as_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers, windows in three of them: traced twice."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    net = deeper("gemma2")
    compiled = NativeEngine(net, config=EngineConfig(page_size=4, kv_tokens=4096, compile=True))
    assert_same(compiled, NativeEngine(net), PROMPTS, SamplingParams(n=2, max_new_tokens=12), "flat")
    assert programs() == 2


def test_graphs_after_a_clear_have_another_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the process's use of a pool with its last graph, and refuses captures into it from then on."""
    pools: list[Any] = []
    handles = iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: types.SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, **_: nullcontext(pools.append(pool)))
    graphs = DecodeGraphs(engine("qwen3").cache, lambda vector: torch.zeros(1), torch.device("cpu"))
    monkeypatch.setattr(graphs, "run", lambda vector, filters: None)
    draws: Any = types.SimpleNamespace(filters=())
    vector: Any = None
    for clear in (False, False, True, False):
        if clear:
            graphs.clear()
        graphs._capture(vector, draws)
    assert pools == [0, 0, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("keep", [False, True, "auto"])
def test_graphs_outlive_sleep_unless_the_weights_go(keep: bool | Literal["auto"], weights: bool) -> None:
    net = type(model("qwen3"))(model("qwen3").config).cuda().eval()
    params = SamplingParams(n=16, max_new_tokens=20, ignore_eos=True)
    native = NativeEngine(net, config=EngineConfig(kv_tokens=65536, keep_pages=keep))
    first = [responses(tree) for tree in native.generate(PROMPTS, params, TREEPO)]
    assert native.loop.runner.graphs is not None
    for _ in range(3):
        captured, pages = dict(native.loop.runner.graphs._graphs), native.cache.bytes
        free = torch.cuda.mem_get_info()[0]
        native.sleep(weights=weights)
        freed = torch.cuda.mem_get_info()[0] - free
        native.wake()
        assert [responses(tree) for tree in native.generate(PROMPTS, params, TREEPO)] == first
        if not weights:
            assert captured
            assert native.loop.runner.graphs._graphs == captured
        if keep is False:
            assert freed >= pages > 0


@pytest.mark.gpu
def test_an_engine_that_is_dropped_gives_its_memory_back() -> None:
    net = type(model("qwen3"))(model("qwen3").config).cuda().eval()
    free = []
    for _ in range(3):
        native = NativeEngine(net, config=EngineConfig(kv_tokens=1 << 20))
        native.generate(PROMPTS, SamplingParams(max_new_tokens=4))
        assert native.cache.memory is not None
        pages = native.cache.bytes
        native = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[-1] < pages


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("program", ["flat", TREEPO], ids=["flat", "treepo"])
def test_replays_sample_what_steps_do_and_wait_for_nothing(program: Any, compiled: bool) -> None:
    net = type(model("qwen3"))(model("qwen3").config)
    net.load_state_dict(model("qwen3").state_dict())
    net.cuda().eval()
    params = SamplingParams(n=16, max_new_tokens=60, ignore_eos=True)
    with_graphs, without = (
        NativeEngine(net, config=EngineConfig(kv_tokens=65536, cuda_graphs=on, compile=on and compiled))
        for on in (True, False)
    )
    expected = without.generate(PROMPTS, params, program)
    trees = with_graphs.generate(PROMPTS, params, program)
    assert [responses(tree) for tree in trees] == [responses(tree) for tree in expected]
    graphs = with_graphs.loop.runner.graphs
    assert graphs is not None
    graph, decoded = next(iter(graphs._graphs.values()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():  # the vector was made in it
            decoded.vector._device.copy_(decoded.vector._host, non_blocking=True)
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
