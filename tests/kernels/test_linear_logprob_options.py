"""extra_ids of linear_logprob: the same numbers and gradients as targets, absent ones, bits that ignore the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import linear_logprob, use_backend
from rolltree.kernels.dispatch import Backend

from .test_linear_logprob import BACKENDS, DEVICE, ROW_KERNELS, inputs


def ids(N: int, K: int, V: int) -> Tensor:
    return torch.randint(0, V, (N, K), generator=torch.Generator().manual_seed(2)).to(DEVICE)


@pytest.mark.parametrize("M", [None, 30])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_ids_against_plain_autograd(backend: Backend, M: int | None) -> None:
    given = inputs(11, 16, 65, M=M, bias=True, temperature="rows", softcap=4.0)
    extra = ids(11, 5, 65)
    extra[:, 1] = extra[:, 0]  # the same id twice in a row
    upstream = torch.randn(11, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    leaves = {n: given[n].clone().requires_grad_() for n in ("hidden", "weight", "bias")}
    with use_backend(backend):
        out = linear_logprob(**(given | leaves), extra_ids=extra)
        assert out.extra_logprob is not None
        loss = out.logprob.sum() + (out.extra_logprob * upstream).sum()
        got = torch.autograd.grad(loss, list(leaves.values()))
    exact = {n: v.detach().double().requires_grad_() for n, v in leaves.items()}
    u = 4.0 * torch.tanh((exact["hidden"] @ exact["weight"].T + exact["bias"]) / 4.0)
    logp = (u / given["temperature"].double()[:, None]).log_softmax(-1)
    row = given.get("row", torch.arange(11, device=DEVICE))
    want_extra = logp.gather(1, extra)
    want_loss = logp[row, given["target"]].sum() + (want_extra * upstream).sum()
    want = torch.autograd.grad(want_loss, list(exact.values()))
    torch.testing.assert_close(out.extra_logprob.double(), want_extra, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out.logprob.double(), logp[row, given["target"]], rtol=2e-6, atol=2e-6)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_absent_ids_are_nan_without_gradient(backend: Backend) -> None:
    given = inputs(7, 16, 65)
    extra = ids(7, 4, 65)
    absent = extra.clone()
    absent[2, 1] = absent[5] = -1
    gone = absent == -1

    def run(these: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = given["hidden"].clone().requires_grad_()
        out = linear_logprob(**(given | {"hidden": hidden}), extra_ids=these)
        assert out.extra_logprob is not None
        (gradient,) = torch.autograd.grad(out.extra_logprob[keep].sum(), hidden)
        # an upstream gradient at absent places, even NaN, goes nowhere
        out = linear_logprob(**(given | {"hidden": hidden}), extra_ids=these)
        assert out.extra_logprob is not None
        upstream = torch.where(keep, 1.0, 0.0 if these is extra else torch.nan)
        (poked,) = torch.autograd.grad(out.extra_logprob, hidden, upstream)
        return out.extra_logprob.detach(), gradient, poked

    with use_backend(backend):
        got, want = run(absent, ~gone), run(extra, ~gone)
    assert got[0][gone].isnan().all()
    assert got[0][~gone].equal(want[0][~gone])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=1e-6)
    assert (got[1][5] == 0).all()


@pytest.mark.parametrize("backend", ROW_KERNELS)
def test_extra_ids_do_not_change_the_bits_of_the_rest(backend: Backend) -> None:
    given = inputs(9, 16, 65, temperature="rows")
    with use_backend(backend):
        alone = linear_logprob(**given)
        out = linear_logprob(**given, extra_ids=given["target"][:, None])
    assert out.logprob.equal(alone.logprob)
    assert out.extra_logprob is not None
    assert out.extra_logprob[:, 0].equal(alone.logprob)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.long), ValueError, r"extra_ids must be \[4, K\], got \[4\]"),
        (torch.zeros(3, 2, dtype=torch.long), ValueError, r"extra_ids must be \[4, K\], got \[3, 2\]"),
        (torch.zeros(4, 2), ValueError, "extra_ids must hold integers"),
        (torch.full((4, 2), 17), IndexError, r"extra_ids must be in -1..16, got 17..17; -1 stands"),
        (torch.full((4, 2), -2), IndexError, r"extra_ids must be in -1..16, got -2..-2"),
    ],
)
def test_mistakes_are_named(extra: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_logprob(torch.zeros(4, 8), torch.zeros(17, 8), torch.zeros(4, dtype=torch.long), extra_ids=extra)


def test_no_extra_ids_a_row() -> None:
    out = linear_logprob(**inputs(4, 8, 17), extra_ids=torch.zeros(4, 0, dtype=torch.long, device=DEVICE))
    assert out.extra_logprob is not None
    assert out.extra_logprob.shape == (4, 0)
