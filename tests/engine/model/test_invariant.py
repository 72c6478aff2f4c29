"""Models with `model.batch_invariant`: a token's log-prob has the same bits wherever it is computed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, TokenTree, UserError, pack
from rolltree.engine.model.decoder import unchecked_logprob
from rolltree.engine.model.invariant import functions
from rolltree.engine.model.invariant.check import DECODING, differing, sample_prompts
from rolltree.engine.model.invariant.functions import OF_NUMBERS, fixed_order, whole_vectors
from rolltree.engine.model.invariant.install import is_invariant, make_invariant
from rolltree.engine.rollout.equal_bits import check_sampler
from rolltree.kernels.libraries import load_library

from ...kernels.on_device import known_order, needs_known_order
from ...support import moe_models
from ..rollout.test_fused_decoder import made

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")

PLAIN = (
    torch.exp,
    torch.log,
    torch.log1p,
    torch.tanh,
    torch.cos,
    torch.sin,
    torch.erf,
    torch.rsqrt,
    F.logsigmoid,
    F.elu,
)
"""Functions that layers call, and that have the same bits anywhere."""
DTYPES = (torch.float32, torch.bfloat16)


def attending(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if dtype == torch.float32 and not known_order:
        pytest.skip(needs_known_order.kwargs["reason"])
    model = made(name, dtype)
    model.set_attn_implementation("rolltree")
    return model


def sampled(model: Any) -> list[TokenTree]:
    params = SamplingParams(n=4, max_new_tokens=9, ignore_eos=True, seed=0)
    return NativeEngine(model, config=EngineConfig(kv_tokens=4096)).generate(sample_prompts(model), params)


@pytest.mark.slow(but=3)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3", "qwen2 with a window", "llama"])
def test_sampled_is_trained_in_any_form(name: str, dtype: torch.dtype) -> None:
    model = make_invariant(attending(name, dtype))
    assert is_invariant(model)
    trees = sampled(model)
    assert differing(model, trees) is None
    for flat in pack(trees, max_tokens=1000, flat=True):  # padded
        values = unchecked_logprob(model, flat).logprob
        for index, leaves, own in zip(flat.tree_index, flat.leaf_index, flat.to_leaves(values), strict=True):
            rows = trees[index].response_rows(int(leaves[0]))
            assert np.array_equal(trees[index].behaviour_logprob[rows], own[0].detach().numpy())


def test_without_it_bits_differ() -> None:
    model = attending("qwen3")
    assert not is_invariant(model)
    assert differing(model, sampled(model)) is not None


def test_a_copy_is_invariant_and_of_its_own() -> None:
    model = make_invariant(attending("llama"))
    other = copy.deepcopy(model)
    assert is_invariant(other)
    own, theirs = (m.model.layers[0].forward._module() for m in (model, other))
    assert own is model.model.layers[0]
    assert theirs is other.model.layers[0]
    assert differing(other, sampled(other)) is None
    before = model.model.layers[0].forward
    make_invariant(model)
    assert model.model.layers[0].forward is before
    assert pickle.loads(pickle.dumps(model)).model.layers[0] is not None


def test_gradients_are_those_without_it() -> None:
    plain, exact = attending("qwen2 with a window"), make_invariant(attending("qwen2 with a window"))
    tree = TokenTree.from_sequences([5, 6, 7], [[8, 9, 10], [8, 9, 11, 12]])
    grads = []
    for model in (plain, exact):
        (batch,) = pack([tree], max_tokens=64)
        unchecked_logprob(model, batch).logprob.sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-5)


def test_checkpointing_recomputes_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_invariant(attending("llama")).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    own = functions.linear
    monkeypatch.setattr(functions, "linear", lambda x, *rest: calls.append(len(x)) or own(x, *rest))
    (batch,) = pack([TokenTree.from_sequences([5, 6, 7], [[8, 9, 10]])], max_tokens=64)
    out = unchecked_logprob(model, batch).logprob.sum()
    forward = len(calls)
    assert forward == 7 * len(model.model.layers)
    out.backward()
    assert len(calls) == 2 * forward


class Mean(nn.Module):
    """A unit whose rows see each other: what batch normalisation does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + 1e-6 * out.mean(-2, keepdim=True)


def test_the_layer_that_is_not_invariant_is_named() -> None:
    model = make_invariant(attending("llama"))
    model.model.layers[1].mlp.down_proj = Mean(model.model.layers[1].mlp.down_proj)
    with pytest.raises(
        UserError, match=r"does not hold for LlamaForCausalLM: Mean gives a token other bits among other rows; leave"
    ):
        check_sampler(model)


@pytest.mark.check
def test_a_sampler_of_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_invariant(attending("llama"))
    trees = sampled(model)
    assert differing(model, trees) is None
    values = trees[1].behaviour_logprob
    at = int(np.flatnonzero(~np.isnan(values))[3])
    values[at] = np.nextafter(values[at], np.float32(0))
    assert differing(model, trees) == DECODING


@pytest.mark.parametrize("case", ["meta", "reference", "head"])
def test_what_is_known_not_to_fit_is_refused_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attending("llama")
    if case == "meta":
        model.to("meta")
        match = "it is for CPUs and GPUs, not for meta devices"
    elif case == "reference":
        monkeypatch.setenv("ROLLTREE_BACKEND", "reference")
        match = "it needs the CPU kernels"
    else:
        model.lm_head = model.lm_head.double()
        match = "the order of sums of the head's product in torch's library is not known"
    with pytest.raises(UserError, match=f"model.batch_invariant does not hold for LlamaForCausalLM: {match}"):
        make_invariant(model)
    assert not is_invariant(model)


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "lfm2_moe"])
def test_other_families(family: str) -> None:
    """Experts, sinks, latent attention, short convolutions."""
    model = make_invariant(moe_models.make(family))
    assert differing(model, sampled(model)) is None


def test_scans_are_refused() -> None:
    with pytest.raises(UserError, match=r"the scan of Qwen3NextGatedDeltaNet .tree_recurrence. sums in chunks"):
        make_invariant(moe_models.make("qwen3_next"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [*OF_NUMBERS, *PLAIN], ids=lambda f: f.__name__)
def test_a_number_does_not_see_its_place(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.rand(1999, generator=torch.Generator().manual_seed(0)).mul_(4).add_(0.01).to(dtype)
    small = [x[begin : begin + 7] for begin in range(0, 700, 7)]
    with fixed_order():
        whole = function(x)
        assert torch.equal(torch.cat([function(some) for some in small]), whole[:700])
        for some in (slice(0, 1), slice(3, 20), slice(40, 103), slice(1, 1990)):
            assert torch.equal(function(x[some]), whole[some])
        assert torch.equal(function(x[:1998].view(2, 999).T), whole[:1998].view(2, 999).T)
    torch.testing.assert_close(whole, function(x), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="PyTorch computes whole vectors with AVX only"
)
def test_without_fixed_order_the_place_of_a_number_shows() -> None:
    wide = torch.rand(1999, generator=torch.Generator().manual_seed(0)).mul_(4).add_(0.01)

    def one_by_one(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([function(number) for number in x.split(1)])

    for function in OF_NUMBERS:
        assert any(not torch.equal(one_by_one(function, x), function(x)) for x in (wide, wide.bfloat16())), function


def test_whole_vectors_of_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for count in (1, 63, 64, 65, 32768, 32769, 65536, 65600, 100_000, 999_999):
            padded = whole_vectors(count)
            used = min(threads, -(-padded // functions.GRAIN))
            assert count <= padded <= count + 64 * threads + 64 * threads
            assert padded % 64 == 0
            assert -(-padded // used) % 64 == 0
            assert whole_vectors(padded) == padded


def test_experts_and_weights_that_lie_across() -> None:
    random = torch.Generator().manual_seed(0)
    x, weights = torch.randn(20, 24, generator=random), torch.randn(3, 24, 40, generator=random)
    ends = torch.tensor([4, 4, 17], dtype=torch.int32)
    with fixed_order():
        out = torch.nn.functional.grouped_mm(x, weights, offs=ends)
        assert torch.equal(out[:4], x[:4] @ weights[0])
        assert torch.equal(out[9], (x[9:10] @ weights[2])[0])
        assert (out[17:] == 0).all()
        bias = torch.ones(40)
        assert torch.equal(torch.addmm(bias, x, weights[1])[:1], torch.addmm(bias, x[:1], weights[1]))
    torch.testing.assert_close(out[4:17], x[4:17] @ weights[2])


def test_autocast_is_refused() -> None:
    model = make_invariant(attending("llama"))
    (batch,) = pack([TokenTree.from_sequences([5, 6, 7], [[8, 9, 10]])], max_tokens=64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="do not go with autocast"):
        unchecked_logprob(model, batch)
