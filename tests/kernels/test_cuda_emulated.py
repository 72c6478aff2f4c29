"""The CUDA C++ kernels where there is no GPU: thread by thread in `emulation`, by the tests of the other backends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from rolltree.kernels import Objective, dispatch
from rolltree.kernels.tree_decode import DecodePlan

from . import test_linear_logprob as linear
from . import test_logprob_from_logits as logits
from . import test_policy_loss as loss
from .emulation.build import build
from .on_device import computes
from .test_tree_decode import by_paths, forest, run, tensors

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


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("page", "dtype", "heads", "kv_heads", "dim", "chunk", "window", "softcap"),
    [
        (1, torch.bfloat16, 8, 2, 64, 1, None, None),
        (1, torch.float16, 8, 1, 64, 7, 30, None),
        (16, torch.bfloat16, 3, 3, 64, 2, None, 5.0),
        (16, torch.float16, 4, 1, 64, 1, 12, 5.0),
        (16, torch.bfloat16, 6, 2, 128, 1, None, 4.0),
        (16, torch.float16, 2, 2, 128, 40, 17, None),
        (1, torch.bfloat16, 2, 1, 128, 3, 9, 4.0),
        pytest.param(1, torch.float16, 4, 1, 128, 1, None, None, marks=pytest.mark.slow),
        pytest.param(16, torch.bfloat16, 4, 1, 256, 5, None, None, marks=pytest.mark.slow),
        (16, torch.float16, 2, 1, 256, 1, 25, 3.0),
        (1, torch.bfloat16, 2, 1, 256, 1, 11, None),
        (1, torch.float16, 2, 1, 256, 2, None, 3.0),
    ],
)
def test_tree_decode(
    page: int,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    chunk: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Every head dimension with and without each option, its pages smaller or larger than what a thread copies."""
    step = forest(seed=heads, roots=1, longest=70, chunk=chunk, page=page)
    q, k, v = tensors(step, heads, kv_heads, dim, dtype)
    truth = by_paths(q.double(), k.double(), v.double(), step, window, softcap)
    plain = by_paths(q, k, v, step, window, softcap)
    found = run("cuda", q, k, v, step.plan, window, softcap)
    for got, theirs, want in zip(found, plain, truth, strict=True):
        error, bound = ((x.double() - want).norm() / want.norm() for x in (got, theirs))
        assert error <= 2 * bound + 2 * torch.finfo(dtype).eps


def chain(length: int, rows: int) -> DecodePlan:
    """One node of ``length`` keys in pages of 16, read by ``rows`` rows at its end."""
    pages, full = -(-length // 16), torch.full((rows,), length - 1, dtype=torch.int32)
    numbers = ([0, pages], list(range(pages)), [0], [length], [0], [0], [rows])
    return DecodePlan(*(torch.tensor(x, dtype=torch.int32) for x in numbers), query_position=full)


@pytest.mark.check
def test_tree_decode_of_long_nodes_and_many_rows() -> None:
    """Several chunks of keys and tiles of rows; a row's bits are the same alone."""
    length, rows, heads = 600, 19, 8
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, heads, 64, generator=generator).bfloat16()
    k, v = torch.randn(2, -(-length // 16), 16, 2, 64, generator=generator).bfloat16()
    out, lse = run("cuda", q, k, v, chain(length, rows))
    exact, exact_lse = run("reference", q.double(), k.double(), v.double(), chain(length, rows))
    plain, _ = run("reference", q, k, v, chain(length, rows))
    error, bound = ((x.double() - exact).norm() / exact.norm() for x in (out, plain))
    assert error <= 2 * bound
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    for row in (0, 9, 18):
        alone, alone_lse = run("cuda", q[row : row + 1], k, v, chain(length, 1))
        assert torch.equal(alone[0], out[row])
        assert torch.equal(alone_lse[0], lse[row])


def test_tree_decode_that_sees_nothing() -> None:
    step = forest(seed=3, roots=1)
    q, k, v = tensors(step, 4, 2, 64, torch.bfloat16)
    hidden = DecodePlan(**step.plan.tensors() | {"query_position": torch.full_like(step.plan.query_position, -1)})
    out, lse = run("cuda", q, k, v, hidden)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for match, bad in (
        ("head dimensions", (q[..., :32].contiguous(), k[..., :32].contiguous(), v[..., :32].contiguous())),
        ("power of two", (q, *(torch.cat([x, x[:, :2]], 1) for x in (k, v)))),  # pages of 6
        ("same strides", (q, k, v.transpose(1, 2).contiguous().transpose(1, 2))),
    ):
        with pytest.raises(ValueError, match=match):
            run("cuda", *bad, step.plan)


@pytest.mark.check
@pytest.mark.parametrize(
    "case", ["plain", "bias", "temperature", "temperature of rows", "softcap", "everything", "several blocks"]
)
def test_linear_logprob(case: str) -> None:
    linear.compare("cuda", linear.CASES[case])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    assert ((found.double() - expected) / scale).abs().max() <= 4 * torch.finfo(torch.float32).eps + (
        0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    )


@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", [n for n in loss.PRESETS if computes("cuda", Objective.preset(n))])
def test_clipped_loss(name: str) -> None:
    loss.test_compiled_equals_reference("cuda", name)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("importance", [True, False])
@pytest.mark.parametrize("estimator", loss.PENALTY)
def test_kl_of_every_token_of_a_vocabulary(estimator: str, importance: bool) -> None:
    loss.test_kl_of_every_token_of_a_vocabulary("cuda", estimator, importance, on_policy=False)


@pytest.mark.check
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, (case, dtype) in enumerate(
            product(["plain", "everything", "several blocks"], [torch.float32, torch.bfloat16, torch.float16])
        )
    ],
)
def test_logprob_from_logits(case: str, dtype: torch.dtype) -> None:
    logits.test_against_fp64("cuda", case, dtype, True)
