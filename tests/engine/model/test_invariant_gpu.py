"""`model.batch_invariant` on a GPU: sampling and training by backend ``invariant``, and its refusals.

Without a GPU the kernels of attention and of the head run in Triton's interpreter, the others in C++.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, TokenTree, UserError, pack
from rolltree.engine.model import attention
from rolltree.engine.model.decoder import unchecked_logprob
from rolltree.engine.model.invariant import check, install
from rolltree.engine.model.invariant.check import DECODING, differing
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.model.sharding import clip_by_rows
from rolltree.engine.rollout.native import draws, step_buffer
from rolltree.kernels import dispatch

from ...kernels.on_device import device_of, needs_known_order, needs_triton
from ...kernels.test_path_chunks import set_chunk
from ..rollout.test_fused_decoder import made

ON_GPU = torch.cuda.is_available()
DEVICE = device_of("invariant")
LENGTHS = (60, 700, 1100, 510, 513)


def needs_products(test: Any) -> Any:
    """Skip a test of the kernels together with the products of a CPU, where these depend on the number of rows."""
    return test if ON_GPU else needs_known_order(test)


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    """Name the backend for the process, as `make_invariant` does for a model on a GPU."""
    dispatch.set_backend("invariant")
    yield
    dispatch.set_backend(None)


def attending(name: str, dtype: torch.dtype) -> Any:
    model = made(name, dtype).to(DEVICE)
    model.set_attn_implementation("rolltree")
    model.config.max_position_embeddings = 2048
    return model


def engine_of(model: Any, **options: Any) -> NativeEngine:
    engine = NativeEngine(model, config=EngineConfig(kv_tokens=16384, **options))
    engine.loop.runner._fused = None  # a CPU's decoder in one call has attention of its own
    return engine


def sampled(
    model: Any, lengths: Sequence[int] = LENGTHS, engine: NativeEngine | None = None, **options: Any
) -> list[TokenTree]:
    engine = engine or engine_of(model, **options)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(5, model.config.vocab_size - 1, size=n).tolist() for n in lengths]
    params = SamplingParams(n=4 if ON_GPU else 2, max_new_tokens=24 if ON_GPU else 3, ignore_eos=True, seed=0)
    return engine.generate(prompts, params)


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="it needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen2 with a window", "llama"])
def test_sampled_is_trained_in_any_form(name: str, dtype: torch.dtype, graphs: bool) -> None:
    model = make_invariant(attending(name, dtype))
    engine = engine_of(model, cuda_graphs=graphs)
    assert differing(model, sampled(model, engine=engine)) is None
    assert engine.loop.runner._replayed is not None  # ten kernels a layer have the bits of modules
    dispatch.set_backend(None)
    assert differing(model, sampled(model, cuda_graphs=graphs)) is not None


@needs_triton
@needs_products
@pytest.mark.slow
def test_the_engine_runs_the_kernels_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's steps and packed trees through the kernels of backend ``invariant``."""
    set_chunk(monkeypatch, 16)
    monkeypatch.setattr(step_buffer, "CHUNK", 16)
    calls: list[int] = []
    decode = import_module("rolltree.kernels.tree_decode.invariant")
    paths = import_module("rolltree.kernels.tree_attention.invariant")
    attend, found = decode.attend, decode.slots_of_items
    located: list[int] = []
    trained: list[int] = []
    monkeypatch.setattr(decode, "slots_of_items", lambda *rest: located.append(1) or found(*rest))
    attend_paths = paths.attend_paths
    monkeypatch.setattr(paths, "attend_paths", lambda *rest: trained.append(1) or attend_paths(*rest))
    monkeypatch.setattr(decode, "attend", lambda q, *rest: calls.append(len(q)) or attend(q, *rest))
    monkeypatch.setattr(check, "PIECE", 20)
    model = make_invariant(attending("qwen2 with a window", torch.float32))
    trees = sampled(model, (9, 31))
    steps = len(calls)
    assert steps >= 2 * 3  # two layers
    assert len(located) <= steps // 2 + 1  # once a step; the layers of the first find them for themselves
    assert not trained
    assert differing(model, trees) is None
    assert trained
    whole = trees[0].columns["behaviour_logprob"]
    whole[~np.isnan(whole)] += np.float32(1e-6)  # a few units in the last place
    assert differing(model, trees) == DECODING


@needs_triton
@needs_products
def test_plain_sequences_have_no_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Varlen attention of torch, which a GPU may have, has another order of sums."""

    def varlen(*_: Any) -> torch.Tensor:
        raise RuntimeError("varlen attention")

    monkeypatch.setattr(attention.varlen, "fits", lambda *_: True)
    monkeypatch.setattr(attention.varlen, "kernel", lambda: varlen)
    model = attending("llama", torch.float32)
    (batch,) = pack([TokenTree.from_sequences([5, 6, 7], [[8, 9]])], max_tokens=64, device=DEVICE)
    with pytest.raises(RuntimeError, match="varlen attention"):
        unchecked_logprob(model, batch)
    unchecked_logprob(make_invariant(model), batch)


def test_drawn_rows_are_scored_where_nothing_was_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []

    def score(logits: torch.Tensor, token: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        scored.append(temperature.T.tolist())
        return torch.tensor([[-101.0, -102.0]]).expand(len(logits), 2)

    monkeypatch.setattr(draws, "score_rows", score)
    monkeypatch.setattr(dispatch, "named", lambda name, device: name == "invariant")
    columns = {
        "temperature": torch.tensor([1.0, 0.5, 0.0, 1.0]),
        "top_k": torch.tensor([0, 0, 0, 3], dtype=torch.int32),
        **{name: torch.arange(4) for name in ("seed", "step")},
    }
    out = draws.draw(torch.randn(4, 11), columns, ("top_k",))
    assert scored == [[[1.0, 0.5, 1.0, 1.0], [1.0] * 4]]
    assert out.logprob[:3].tolist() == [-101.0, -101.0, 0.0]  # the third is greedy
    assert -20 < out.logprob[3] < 0  # of the three tokens that were left
    assert out.raw_logprob.tolist() == [-102.0] * 4


class Head(SimpleNamespace):
    pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias": torch.zeros(1)}, "sampling on a GPU applies its head's bias, soft cap or scale by itself"),
        ({"softcap": 30.0}, "sampling on a GPU applies its head's bias, soft cap or scale by itself"),
        ({"scale": 0.5}, "sampling on a GPU applies its head's bias, soft cap or scale by itself"),
        ({"lora": 1}, "products of an adapter on the head depend on the number of rows"),
        ({}, None),
    ],
)
def test_heads_that_a_gpu_computes_otherwise_are_refused(
    options: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.float32)
    given = Head(**{"weight": weight, "bias": None, "softcap": None, "scale": 1.0, "lora": None, **options})
    monkeypatch.setattr(install, "head", lambda model: given)
    monkeypatch.setattr(dispatch, "_unusable", lambda name, device: None)
    reason = install.unfit(made("llama"))
    assert reason is None if said is None else str(reason).startswith(said)


def test_another_backend_that_is_named_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"), is_cuda=True, dtype=torch.float32)
    monkeypatch.setattr(install, "head", lambda model: Head(weight=weight))
    monkeypatch.setattr(dispatch, "_unusable", lambda name, device: None)
    monkeypatch.setenv("ROLLTREE_BACKEND", "triton")
    with pytest.raises(UserError, match="it needs Triton, which is not installed or not chosen"):
        make_invariant(made("llama"))
    weight.device = torch.device("xpu")
    with pytest.raises(UserError, match="it is for CPUs and GPUs, not for xpu devices"):
        make_invariant(made("llama"))


def test_the_norm_of_gradients_is_taken_where_they_are() -> None:
    weight = torch.nn.Parameter(torch.empty(3, 4, device="meta"))  # a device other than the host
    weight.grad = torch.empty_like(weight)
    assert clip_by_rows([weight], 1.0).device.type == "meta"
    assert clip_by_rows([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
