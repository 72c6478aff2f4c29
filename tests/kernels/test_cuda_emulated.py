"""The CUDA C++ kernels where there is no GPU: thread by thread in `emulation`, by the tests of the other backends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from rolltree.kernels import dispatch

from . import test_logprob_from_logits as logits
from .emulation.build import build

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++"),
]


@pytest.fixture(scope="module", autouse=True)
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Backend "cuda" takes tensors on the CPU."""
    torch.ops.load_library(str(build(tmp_path_factory.mktemp("emulated"))))
    unusable = dispatch._unusable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_unusable", lambda name, device: None if name == "cuda" else unusable(name, device))
        yield


@pytest.mark.parametrize("dtype", logits.HALF)
def test_gradient_of_many_targets(dtype: torch.dtype) -> None:
    """Targets twice, side by side, as far apart as a thread's turns are, and among the first and last elements."""
    vocab = 2 * 4096 + 21  # a thread has up to three packs; rows are aligned differently
    rows = [[5, 5, 6, 5 + 4096, 5 + 8192], [vocab - 1, 0, vocab - 4], [], [700, 701, 700 + 4096, 40]]
    start = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    target = torch.tensor([y for row in rows for y in row])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(rows), vocab, generator=generator).to(dtype)
    upstream = torch.randn(len(target), generator=generator)
    per_log, per_p, constant = torch.randn(3, len(rows), generator=generator)
    constant[2] = per_log[2] = per_p[2] = 0.0  # a masked row
    logits[2, 7] = torch.nan
    logprob = logits.double().log_softmax(-1)
    lse = (logits.double() - logprob)[:, 0].float()
    p = logprob.exp()
    expected = torch.zeros(len(rows), vocab, dtype=torch.float64)
    for n, row in enumerate(rows):
        if not row:
            continue
        grads = upstream[start[n] : start[n + 1]].double()
        c = constant[n].double() - grads.sum()
        expected[n] = p[n] * (c - per_log[n].double() * logprob[n] + per_p[n].double() * p[n])
        expected[n].index_add_(0, torch.tensor(row), grads)
    none, ones = torch.zeros(0), torch.ones(len(rows))
    found = logits.clone()  # written over
    torch.ops.rolltree_cuda.logit_gradient(
        found, none, ones, 0.0, start, target, lse, torch.zeros(len(rows)), upstream, constant, per_log, per_p, found
    )
    assert (found[2] == 0).all()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1.0)
    rounding = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2
    assert ((found.double() - expected) / scale).abs().max() <= rounding


@pytest.mark.check
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if number % 6 == 0 else pytest.mark.slow)
        for number, (case, dtype) in enumerate(
            product(["plain", "everything", "several blocks, capped", "several blocks"], logits.HALF)
        )
    ],
)
def test_logprob_from_logits(case: str, dtype: torch.dtype) -> None:
    logits.test_against_fp64("cuda", case, dtype, True)
