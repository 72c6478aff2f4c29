"""Steps compiled, and padded for CUDA graphs: the numbers are those of the steps themselves. Replays need a GPU."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.graphs import DecodeGraphs, _bucket
from rolltree.engine.rollout.scheduler import Step

from .test_native_engine import MODELS, PROMPTS, TREEPO, assert_all_free, engine, model, responses


class Uncaptured(DecodeGraphs):
    """Pads as the graphs do, and computes at once."""

    steps = 0

    def logits(self, step: Step) -> torch.Tensor:
        self.steps += 1
        padded = self.pad(step, _bucket(len(step.input_ids), 8), 1024)
        assert (padded.plan().page_indptr.diff() >= 0).all()
        return self.run(padded)[: len(step.input_ids)]


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
            atol=2e-6,
            rtol=0,
            equal_nan=True,
        )
    assert_all_free(native)


def test_compiled_once_for_all_sizes() -> None:
    """Tokens, log-probs, and a second run with other sizes, a single row among them, compiles nothing."""
    compiled = NativeEngine(model("qwen3"), config=EngineConfig(page_size=4, kv_tokens=4096, compile=True))
    counters = torch._dynamo.utils.counters
    counters.clear()
    cases: list[tuple[list[list[int]], int, Any]] = [
        (PROMPTS, 5, TREEPO),
        (PROMPTS[2:5], 3, "flat"),
        (PROMPTS[:1], 1, "flat"),
        (PROMPTS[3:4], 2, "flat"),
        (PROMPTS * 4, 4, TREEPO),
    ]
    graphs = 0
    for i, (prompts, n, program) in enumerate(cases):
        params = SamplingParams(n=n, max_new_tokens=20)
        expected = engine().generate(prompts, params, program)
        if i == 0:
            trees, sources = run_and_get_code(compiled.generate, prompts, params, program)
            fused = re.findall(r"cpp_fused\w+", "".join(sources))
            assert any("_sin_" in name and "index_copy" in name for name in fused), "rotary and the write of keys"
        else:
            trees = compiled.generate(prompts, params, program)
        assert [responses(tree) for tree in trees] == [responses(tree) for tree in expected]
        for tree, other in zip(trees, expected, strict=True):
            np.testing.assert_allclose(tree.behaviour_logprob, other.behaviour_logprob, atol=2e-6, rtol=0)
        if i == 0:
            graphs = counters["stats"]["unique_graphs"]
    assert 0 < counters["stats"]["unique_graphs"] == graphs
    assert_all_free(compiled)


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
    padded, graph, _ = next(iter(graphs._graphs.values()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        padded._device.copy_(padded._host, non_blocking=True)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
