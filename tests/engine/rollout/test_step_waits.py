"""A step makes the host wait for its device once, when it fetches what was drawn. A meta device stands for a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams
from rolltree.engine.rollout.native.assembly import Step
from rolltree.engine.rollout.native.compiled import Decoded, DecodeGraphs
from rolltree.engine.rollout.native.draws import Draws
from rolltree.kernels import checks
from rolltree.kernels.tree_decode import api

from ...support.host_waits import HostWaits, waits
from .test_native_engine import PROMPTS, model

FETCH = "aten::_to_copy"
PLAIN = SamplingParams(n=3, max_new_tokens=8, ignore_eos=True)
FILTERED = SamplingParams(n=3, max_new_tokens=8, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)


@pytest.fixture(autouse=True)
def meta_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WITHOUT_VALUES", ())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it does not know the meta device
    monkeypatch.setattr(api, "_decode", api.tree_decode_op)  # whose fake needs no values


class Counted(DecodeGraphs):
    """Computes at once, and lists what the host waits for until the device has all of a step."""

    steps = 0
    launching: list[str]

    def decode(self, step: Step, draws: Draws, adapter: Any) -> Decoded:
        self.steps += 1
        with HostWaits() as seen:
            decoded = self.run(self.pad(step, draws, 32, 256, adapter), draws.filters)
        self.launching += seen.calls
        return decoded


def on_meta(*, graphs: bool) -> NativeEngine:
    native = NativeEngine(copy.deepcopy(model("llama")).to("meta"), config=EngineConfig(page_size=4, kv_tokens=4096))
    if graphs:
        run = native.loop.runner
        run.graphs = Counted(native.cache, run.decode_logits, torch.device("meta"))
        run.graphs.launching = []
    return native


def generate(native: NativeEngine, params: SamplingParams) -> tuple[list[str], int]:
    """Return the calls in which the host waits, and the steps; every fetched number is 0, which is a token."""
    before = native.loop.counts["steps"]
    seen = waits(lambda: native.generate(PROMPTS, params, "flat"), value=0.0)
    return seen, native.loop.counts["steps"] - before


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("params", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])
def test_a_step_waits_for_what_it_drew(graphs: bool, params: SamplingParams) -> None:
    """Prefill and decode: nothing else is waited for. What a graph would hold waits for nothing at all."""
    native = on_meta(graphs=graphs)
    seen, steps = generate(native, params)
    assert steps >= 8
    assert seen == [FETCH] * steps
    if graphs:
        counted: Any = native.loop.runner.graphs
        assert counted.steps >= 7
        assert counted.launching == []


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])
def test_waits_are_seen(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the parameters that the device is waited for, and a number that is read on the way."""
    native = on_meta(graphs=graphs)
    logits = native.loop.runner.logits

    def waiting(hidden: torch.Tensor, runs: Any) -> torch.Tensor:
        out = logits(hidden, runs)
        torch.zeros(3).to("meta")
        return out + float(out.max().cpu())

    monkeypatch.setattr(native.loop.runner, "logits", waiting)
    seen, steps = generate(native, PLAIN)
    assert seen == [f"{FETCH}, blocking", FETCH, FETCH] * steps
    if graphs:
        counted: Any = native.loop.runner.graphs
        assert counted.launching == [f"{FETCH}, blocking", FETCH] * counted.steps
