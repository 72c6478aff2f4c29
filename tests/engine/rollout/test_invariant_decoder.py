"""With `model.batch_invariant` the steps that a GPU replays are ten kernels a layer too, with the bits of training.

In Triton's interpreter, which takes the place of a CPU's kernels here. Weights of float32 have their depth in one part;
here some have it in several, as those of bfloat16 do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.engine.model.invariant import check
from rolltree.engine.model.invariant.check import differing
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.rollout.native import runner, step_buffer
from rolltree.engine.rollout.native.fused_decoder import FusedDecoder
from rolltree.kernels import dispatch
from rolltree.kernels.linear.tiles import Order, Tile

from ...kernels.on_device import needs_interpreter, needs_known_order
from ...kernels.test_path_chunks import set_chunk
from ...support.launches import launches
from .test_fused_decoder import MODELS, made
from .test_graph_decoder import replaying, sampled

pytestmark = [needs_interpreter, needs_known_order]

PARTS = 3
LAYER = [
    "add_norm_kernel", "several_kernel", "store_kernel", "partial_kernel", "merge_kernel", "linear_kernel",
    "add_norm_kernel", "several_kernel", "gate_kernel", "linear_kernel",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every op on Triton, with short chunks of keys, and name the backend as `make_invariant` does on a GPU."""
    set_chunk(monkeypatch, 16)
    monkeypatch.setattr(step_buffer, "CHUNK", 16)
    monkeypatch.setitem(dispatch._PREFERENCE, "cpu", ("triton", "reference"))  # type: ignore[index]
    dispatch.set_backend("invariant")
    yield
    dispatch.set_backend(None)


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that divides the depth of narrow weights from a depth on."""
    linear = import_module("rolltree.kernels.linear.triton")
    users = ("linear.triton", "linear.several", "decoder_layer.invariant")

    def set_depth(least: int) -> None:
        def order_of(width: int, depth: int, dtype: torch.dtype) -> Order:
            return Order(16, PARTS if width <= 64 and depth >= least else 1)

        for user in users:
            monkeypatch.setattr(import_module(f"rolltree.kernels.{user}"), "order_of", order_of)

    def tiles_for(order: Order, dtype: torch.dtype, depth: int) -> tuple[Tile, ...]:
        return Tile(16, 32, 4, 3, apart=order.parts > 1), Tile(32, 64, 4, 3)

    monkeypatch.setattr(linear, "tiles_for", tiles_for)
    linear.agreeing.cache_clear()
    yield set_depth
    linear.agreeing.cache_clear()


def attending(name: str) -> Any:
    model = made(name)
    model.set_attn_implementation("rolltree")
    return make_invariant(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("least", [64, 32])
def test_the_bits_of_modules(name: str, least: int, deep: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In windows too; from a depth of 32 on no weights are side by side."""
    deep(least)
    model = attending(name)
    (expected,) = sampled(replaying(model, fused=False), 3)
    for window in (1, 4):
        native = replaying(model, fused=True, window=window)
        (tree,) = sampled(native, 3)
        assert native.loop.runner._replayed is not None
        assert tree.token_id.tolist() == expected.token_id.tolist()
        assert tree.behaviour_logprob.tobytes() == expected.behaviour_logprob.tobytes()
    assert not caplog.records
    assert np.isfinite(tree.behaviour_logprob).sum() == 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_training(name: str, deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but ten kernels a layer computes the decoded rows."""
    deep(64)
    monkeypatch.setattr(check, "PIECE", 20)
    ran: list[Any] = []
    run = FusedDecoder.run
    monkeypatch.setattr(FusedDecoder, "run", lambda *step: ran.append(run(*step)) or ran[-1])
    model = attending(name)
    native = replaying(model, fused=True)
    monkeypatch.setattr(native.loop.runner, "_invariant", False)  # so that its modules compute no such step
    trees = sampled(native, 3)
    assert len(ran) == 2
    assert all(hidden is not None for hidden in ran)
    assert differing(model, trees) is None


@pytest.mark.slow
def test_a_decoder_of_other_bits_is_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One unit in the last place of one number of one layer; the samples are those of modules."""
    model = attending("qwen3")
    (expected,) = sampled(replaying(model, fused=False), 3)
    kernels = import_module("rolltree.kernels.decoder_layer.triton")
    gated, calls = kernels.gated, []

    def other(both: torch.Tensor) -> torch.Tensor:
        out = gated(both)
        calls.append(len(out))
        if len(calls) == 2:
            out.view(torch.int32)[0, 5] ^= 1 << 12
        return out

    monkeypatch.setattr(kernels, "gated", other)
    native = replaying(model, fused=True)
    with caplog.at_level(logging.WARNING):
        (tree,) = sampled(native, 3)
    assert native.loop.runner._replayed is None
    assert len(calls) == 3
    assert [record.message for record in caplog.records] == [
        "Decoding runs the model's modules: as one call a layer has other bits on cpu."
    ]
    assert tree.behaviour_logprob.tobytes() == expected.behaviour_logprob.tobytes()


@pytest.mark.slow
def test_a_captured_step_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(runner, "_capturing", lambda device: capturing)
    native = replaying(attending("llama"), fused=True)
    running, modules = native.loop.runner, []
    decode = running._decode
    monkeypatch.setattr(running, "_decode", lambda *step: modules.append(1) or decode(*step))
    sampled(native, tokens=2)
    assert len(modules) == 2  # the prompt, and one step of decoding
    capturing = True
    sampled(native, tokens=2)
    assert len(modules) == 3


@pytest.mark.slow
def test_a_layer_is_ten_kernels(deep: Any) -> None:
    """Parts of a depth are added by the norm that follows; the slots of keys are found once a step."""
    deep(64)
    model, nodes = attending("qwen3"), []
    native = replaying(model, fused=True)
    native.loop.runner._invariant = False
    graphs: Any = native.loop.runner.graphs
    run = graphs.run

    def counted(vector: Any, filters: Any) -> Any:
        decoded: list[Any] = []
        nodes.append(launches(lambda: decoded.append(run(vector, filters))))
        return decoded[0]

    graphs.run = counted
    sampled(native, tokens=3)
    assert len(nodes) == 2
    names = nodes[1]  # the first one makes the table of rotations, before a graph is captured
    begin = names.index("add_norm_kernel")
    assert names[begin : begin + 31] == 3 * LAYER + ["add_norm_kernel"]
    assert names.count("slots_kernel") == 1
    assert 28 * 10 + len(names) - 30 <= 320
