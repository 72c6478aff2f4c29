"""Row statistics from the GEMM's epilogue equal those of the row kernels, in fp64 truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltree.kernels import dispatch

from .test_linear_logprob import DEVICE, errors, inputs

if reason := dispatch._unusable("triton", DEVICE):
    pytest.skip(f"triton does not run here: {reason}", allow_module_level=True)

from rolltree.kernels.linear_logprob import triton_gemm

NAMES = ("logsumexp", "entropy", "sum_p2")


def exact(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, softcap: float) -> dict[str, Tensor]:
    z = hidden.double() @ weight.double().T + (bias.double() if len(bias) else 0)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature.double()[:, None]
    logp = z.log_softmax(-1)
    p = logp.exp()
    return dict(zip(NAMES, (z.logsumexp(-1), -(p * logp.clamp(min=-1e4)).sum(-1), (p * p).sum(-1)), strict=True))


@pytest.mark.parametrize(("N", "H", "V"), [(3, 16, 97), (130, 48, 300), (1, 80, 2500), (7, 64, 1)])
@pytest.mark.parametrize("options", [False, True])
def test_against_fp64(N: int, H: int, V: int, options: bool) -> None:
    given = inputs(N, H, V)
    bias = torch.randn(V, device=DEVICE) if options else torch.empty(0, device=DEVICE)
    temperature = 0.5 + torch.rand(N, device=DEVICE) if options else torch.ones(N, device=DEVICE)
    args = (given["hidden"], given["weight"], bias, temperature, 5.0 if options else 0.0)
    lse, correction, entropy, sum_p2 = triton_gemm.statistics(*args, True, True)
    truth = exact(*args)
    got = errors(dict(zip(NAMES, (lse, entropy, sum_p2), strict=True)), truth)
    assert max(got.values()) < 2e-6
    assert (correction.abs() <= 1e-6 * lse.abs().clamp(min=1)).all()


@pytest.mark.parametrize("level", [-300.0, 3000.0])
def test_far_from_zero(level: float) -> None:
    given = inputs(5, 16, 300)
    bias, one = torch.full((300,), level, device=DEVICE), torch.ones(5, device=DEVICE)
    lse, correction, entropy, _ = triton_gemm.statistics(given["hidden"], given["weight"], bias, one, 0.0, True, False)
    truth = exact(given["hidden"], given["weight"], bias, one, 0.0)
    assert ((lse.double() + correction.double()) - truth["logsumexp"]).abs().max() < 1e-3  # logits are rounded, not lse
    assert (entropy.double() - truth["entropy"]).abs().max() < 1e-3


def test_a_row_does_not_see_the_batch_and_a_bad_row_stays_alone() -> None:
    given = inputs(140, 16, 300)
    hidden, weight, nothing = given["hidden"], given["weight"], torch.empty(0, device=DEVICE)
    whole = triton_gemm.statistics(hidden, weight, nothing, torch.ones(140, device=DEVICE), 0.0, True, True)
    alone = triton_gemm.statistics(hidden[133:134], weight, nothing, torch.ones(1, device=DEVICE), 0.0, True, True)
    for a, b in zip(whole, alone, strict=True):
        assert a[133:134].equal(b)
    hidden = hidden.clone()
    hidden[7] = torch.nan
    poisoned = triton_gemm.statistics(hidden, weight, nothing, torch.ones(140, device=DEVICE), 0.0, True, True)
    others = torch.arange(140, device=DEVICE) != 7
    for a, b in zip(whole, poisoned, strict=True):
        assert b[7].isnan()
        assert a[others].equal(b[others])


def test_shares_cover_the_vocabulary() -> None:
    for V in (1, 127, 129, 50257, 151936, 262145):
        shares, tiles = triton_gemm.shares_of(V)
        assert shares <= triton_gemm.SHARES
        assert (shares - 1) * tiles * triton_gemm.COLUMNS < V <= shares * tiles * triton_gemm.COLUMNS
