"""On a CPU a token's log-prob has the same bits when it is sampled and when it is trained, with any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels import Objective, PolicyFields, Term, linear_logprob, linear_terms_loss, sample_tokens
from rolltree.kernels.libraries import load_library
from rolltree.kernels.linear_logprob import logprob_from_logits
from rolltree.kernels.linear_logprob.head import Head, column_parts, few_rows, has_equal_bits, softcapped
from rolltree.kernels.sampling import SampleOutput

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")

ROWS = (1, 2, 3, 11, 12, 64, 257)
MANY = 400  # rows that a library multiplies in fp32
TEMPERATURES = (1.0, 0.7, 1.3)
DTYPES = (torch.float32, torch.bfloat16)


def operands(V: int, H: int, dtype: torch.dtype, rows: int = MANY) -> tuple[Tensor, Tensor]:
    """Return hidden [rows, H] and weight [V, H], for which log-probs of sampled tokens are about -2."""
    random = torch.Generator().manual_seed(V * H)
    hidden, weight = torch.randn(rows, H, generator=random), torch.randn(V, H, generator=random)
    weight = (weight * 3 / H**0.5).to(dtype)
    if not has_equal_bits(weight):
        pytest.skip("torch's library sums fp32 in an order that the kernels' products do not have")
    return hidden.to(dtype), weight


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [N, V] fp32 as `Runner.logits` computes them."""
    return Head(weight, None, None, torch.float32).logits(hidden, torch.empty(len(hidden), len(weight)))


def sampled(hidden: Tensor, weight: Tensor, temperature: float | Tensor) -> SampleOutput:
    n = len(hidden)
    return sample_tokens(
        logits_of(hidden, weight), temperature=temperature, seed=torch.arange(n), step=torch.zeros(n, dtype=torch.int64)
    )


def loss_logprob(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [N] that `linear_policy_loss` computes with its gradients."""
    one = torch.ones(len(target))
    term = Term(PolicyFields(one, 0 * one, one, old_logprob=-one), Objective(entropy_coef=0.1), normalizer=1.0)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_terms_loss(hidden, weight, target, [term], temperature=temperature)
    out.loss.backward()
    assert hidden.grad is not None
    return out.logprob, out.entropy


@pytest.mark.slow(but=37)
@pytest.mark.check(but=20)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [7, 50, 1003, 1030, 2100])
def test_sampled_is_trained(V: int, dtype: torch.dtype, rows: int) -> None:
    hidden, weight = operands(V, 200, dtype)
    temperature = torch.tensor(TEMPERATURES)[torch.arange(MANY) % 3]
    whole = sampled(hidden, weight, temperature)
    some, its = slice(5, 5 + rows), temperature[5 : 5 + rows]
    few = sampled(hidden[some], weight, its)
    for target, mine, scaled in ((few.token, some, its), (whole.token, slice(None), temperature)):
        trained = linear_logprob(hidden[mine], weight, target, temperature=scaled, want=("entropy",))
        fused, fused_entropy = loss_logprob(hidden[mine], weight, target, scaled)
        raw = linear_logprob(hidden[mine], weight, target).logprob
        recorded = few if target is few.token else whole
        assert torch.equal(recorded.logprob, trained.logprob)
        assert torch.equal(recorded.logprob, fused)
        assert torch.equal(recorded.raw_logprob, raw)
        assert trained.entropy is not None
        assert torch.equal(recorded.entropy, trained.entropy)
        assert torch.equal(recorded.entropy, fused_entropy)
    scored = linear_logprob(
        hidden, weight, torch.cat([whole.token[:5], few.token, whole.token[5 + rows :]]), temperature=temperature
    )
    assert torch.equal(few.logprob, scored.logprob[some])  # sampled among few rows, trained among many
    narrow = linear_logprob(hidden[some], weight, whole.token[some], temperature=its)
    assert torch.equal(whole.logprob[some], narrow.logprob)  # the other way round


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [5.0, 30.0])
def test_capped_logits(softcap: float, dtype: torch.dtype) -> None:
    """As the native engine caps them, and as the loss does; torch's own tanh has other bits."""
    hidden, weight = operands(1003, 200, dtype, rows=40)
    temperature = torch.tensor(TEMPERATURES)[torch.arange(40) % 3]
    plain = logits_of(hidden, weight)
    logits = softcapped(plain.clone(), softcap)
    torch.testing.assert_close(logits, softcap * torch.tanh(plain / softcap), rtol=1e-6, atol=1e-6)
    assert torch.equal(softcapped(plain[3:4].clone(), softcap), logits[3:4])
    options = {"temperature": temperature, "seed": torch.arange(40), "step": torch.zeros(40, dtype=torch.int64)}
    out = sample_tokens(logits, **options)  # type: ignore[arg-type]
    trained = linear_logprob(hidden, weight, out.token, temperature=temperature, softcap=softcap, want=("entropy",))
    assert torch.equal(out.logprob, trained.logprob)
    assert trained.entropy is not None
    assert torch.equal(out.entropy, trained.entropy)
    other = sample_tokens(softcap * torch.tanh(plain / softcap), **options)  # type: ignore[arg-type]
    assert not torch.equal(other.logprob, trained.logprob)


@pytest.mark.parametrize("scale", [0.0625, 8.0])
def test_logits_scaled_by_powers_of_two(scale: float) -> None:
    """A factor of the logits where tokens are sampled is a temperature where they are trained (`Head.options`)."""
    hidden, weight = operands(1003, 200, torch.float32, rows=40)
    out = sample_tokens(
        logits_of(hidden, weight / scale) * scale,
        temperature=0.7,
        seed=torch.arange(40),
        step=torch.zeros(40, dtype=torch.int64),
    )
    trained = linear_logprob(hidden, weight / scale, out.token, temperature=torch.tensor(0.7 / scale).expand(40))
    assert torch.equal(out.logprob, trained.logprob)


@pytest.mark.parametrize("filters", [{"top_k": 0}, {"top_k": 5000}, {"top_p": 1.0, "min_p": 0.0}])
def test_filters_that_keep_everything(filters: dict[str, float]) -> None:
    logits = 3 * torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))
    options = {"seed": torch.arange(9), "step": torch.zeros(9, dtype=torch.int64)}
    plain = sample_tokens(logits, temperature=0.8, **options)
    assert torch.equal(sample_tokens(logits, temperature=0.8, **options, **filters).logprob, plain.logprob)  # type: ignore[arg-type]
    assert torch.equal(plain.logprob, logprob_from_logits(logits, plain.token, temperature=0.8).logprob)


@pytest.mark.parametrize("wanted", [(), ("entropy",), ("sum_p2",), ("entropy", "sum_p2")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_further_statistics_do_not_show(dtype: torch.dtype, wanted: tuple[str, ...]) -> None:
    for V in (1, 15, 1024, 5003):
        logits = (4 * torch.randn(20, V, generator=torch.Generator().manual_seed(V))).to(dtype)
        out = sample_tokens(logits, temperature=1.1, seed=torch.arange(20), step=torch.zeros(20, dtype=torch.int64))
        trained = logprob_from_logits(logits, out.token, temperature=1.1, want=wanted)
        assert torch.equal(out.logprob, trained.logprob)


@pytest.mark.check(but=14)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [1, 63, 192, 193, 256, 385, 577])
@pytest.mark.parametrize("V", [47, 48, 1071, 1072])
def test_a_row_does_not_see_how_many_there_are(V: int, H: int, dtype: torch.dtype) -> None:
    hidden, weight = operands(V, H, dtype)
    whole = logits_of(hidden, weight)
    for rows in (*ROWS, 13, 65, 383, 384, 385):
        assert torch.equal(logits_of(hidden[3 : 3 + rows], weight), whole[3 : 3 + rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_sums_is_seen(dtype: torch.dtype) -> None:
    """The same sums backwards: along the depth of the products, and along the vocabulary.

    A vocabulary moved by one has nearly the same sums in lanes, whose total is in fp64: it shows in one row or none.
    """
    V, H = 2100, 600
    hidden, weight = operands(V, H, dtype, rows=64)
    out = sampled(hidden, weight, 1.0)
    trained = linear_logprob(hidden.flip(1), weight.flip(1), out.token).logprob
    assert not torch.equal(out.logprob, trained)
    torch.testing.assert_close(out.logprob, trained, rtol=1e-5, atol=1e-5)
    trained = linear_logprob(hidden, weight.flip(0), V - 1 - out.token).logprob
    assert not torch.equal(out.logprob, trained)
    torch.testing.assert_close(out.logprob, trained, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("H", [5, 192, 193, 320, 576, 1025])
def test_the_order_of_fp32_sums_is_fixed(H: int, rows: int) -> None:
    hidden, weight = operands(53, H, torch.float32, rows)
    block = torch.ops.rolltree_cpu.library_block(H)
    assert 0 < block <= H
    x, w = hidden.double().numpy(), weight.double().numpy()
    total = np.zeros((rows, 53), np.float32)
    for first in range(0, H, block):
        part = np.zeros_like(total)
        for k in range(first, min(first + block, H)):  # a product of fp32 is exact in fp64
            part = (part + np.multiply.outer(x[:, k], w[:, k])).astype(np.float32)
        total = part if first == 0 else total + part
    assert np.array_equal(logits_of(hidden, weight).numpy(), total)


def test_the_library_has_the_order_that_is_found() -> None:
    for H in (64, 576, 1536):
        hidden, weight = operands(300, H, torch.float32)
        own = torch.empty(few_rows(), 300)
        torch.ops.rolltree_cpu.linear(hidden[: few_rows()], weight, None, own)
        assert torch.equal(own, (hidden @ weight.T)[: few_rows()])


def test_parts_of_the_vocabulary_are_wide() -> None:
    for V in (1, 1024, 1025, 1071, 1072, 2048, 2050, 5000):
        parts = column_parts(V, torch.device("cpu"))
        assert sum(parts) == V
        assert min(parts) >= min(V, 48)
