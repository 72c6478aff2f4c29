"""Products of a row have the same bits whatever the number of rows, and the gradients of `F.linear`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import cpp_extension

from rolltree.kernels import BackendError, machine, use_backend
from rolltree.kernels.libraries import load_library
from rolltree.kernels.linear import api, library_agrees, linear
from rolltree.kernels.linear_logprob.head import few_rows

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"
ROWS = (1, 2, 3, 11, 12, 64, 257)
SHAPES = [(1, 1), (7, 33), (47, 192), (48, 193), (64, 48), (130, 577), (300, 1025)]
DTYPES = (torch.float32, torch.bfloat16)


def operands(N: int, K: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [rows, K], weight [N, K] and bias [N]."""
    random = torch.Generator().manual_seed(N * K)
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((rows, K), (N, K), (N,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.check(but=8)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a_row_does_not_see_the_others(N: int, K: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = operands(N, K, dtype, few_rows() + 300)
    given = bias if biased else None
    whole = linear(x, weight, given)
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    error = K * 2**-24 * magnitude + (2**-8 if dtype == torch.bfloat16 else 2**-23) * exact.abs()
    assert ((whole.double() - exact).abs() <= error).all()
    for rows in (*ROWS, few_rows(), few_rows() + 1):
        assert torch.equal(linear(x[5 : 5 + rows], weight, given), whole[5 : 5 + rows]), rows


def test_torch_has_other_bits_for_few_rows() -> None:
    """Without this op the number of rows shows, which the tests above would see."""
    seen = 0
    for N, K in SHAPES:
        x, weight, _ = operands(N, K, torch.float32, 400)
        whole = F.linear(x, weight)
        seen += sum(not torch.equal(F.linear(x[:rows], weight), whole[:rows]) for rows in ROWS)
    assert seen > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_do_not_show(dtype: torch.dtype) -> None:
    x, weight, bias = operands(50, 70, dtype, 24)
    plain = linear(x, weight, bias)
    assert torch.equal(linear(x.T.contiguous().T, weight.T.contiguous().T, torch.stack([bias, bias], 1)[:, 0]), plain)
    assert torch.equal(linear(x.view(2, 3, 4, 70), weight, bias), plain.view(2, 3, 4, 50))
    assert torch.equal(linear(x[7], weight, bias), plain[7])
    assert linear(x[:0], weight, bias).shape == (0, 50)


@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_torch(dtype: torch.dtype, rows: int) -> None:
    found = []
    for product in (linear, F.linear):
        leaves = [t.requires_grad_() for t in operands(60, 48, dtype, rows)]
        out = product(leaves[0][None], *leaves[1:])
        found.append(torch.autograd.grad((out.float() ** 2).sum(), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-6 if dtype == torch.bfloat16 else 1e-4, atol=rows * 2e-3)
    x, weight, _ = operands(60, 48, dtype, rows)
    linear(x, weight.requires_grad_()).sum().backward()  # of some leaves alone
    assert weight.grad is not None
    assert x.grad is None


@pytest.mark.parametrize("rows", [3, 500])
def test_without_a_gradient_autograd_is_left_out(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(60, 48, torch.float32, rows)
    weight.requires_grad_()
    recorded = linear(x, weight, bias)
    assert recorded.requires_grad
    monkeypatch.setattr(api, "_Linear", None)
    with torch.no_grad():
        assert torch.equal(linear(x, weight, bias), recorded)
    with pytest.raises(AttributeError):
        linear(x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_library_of_another_order_is_not_used(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands(300, 768, dtype, 3 * few_rows() + 5)
    own = linear(x, weight)
    other = torch.arange(768).roll(1)
    plain = F.linear
    monkeypatch.setattr(api.F, "linear", lambda x, w, b=None: plain(x[:, other], w[:, other], b))
    api._agrees.cache_clear()
    try:
        assert not library_agrees(300, 768, dtype, False)
        assert torch.equal(linear(x, weight), own)
        monkeypatch.setattr(api, "library_agrees", lambda *_: True)
        assert not torch.equal(linear(x, weight), own)  # the other order does show
    finally:
        api._agrees.cache_clear()


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias = operands(5, 4, torch.float32, 3)
    for wrong, message in (
        ((x.double(), weight.double()), "x must be fp32 or bf16"),
        ((x, weight.bfloat16()), "weight must be fp32"),
        ((x[:, :3], weight), r"weight must be \[N, 3\]"),
        ((x, weight, bias[:4]), r"bias must be \[5\]"),
        ((x.to("meta"), weight), "meta device"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(*wrong)
    with use_backend("reference"), pytest.raises(BackendError, match="linear has no 'reference' backend"):
        linear(x, weight)


@pytest.mark.slow
@pytest.mark.skipif(not (machine.is_x86() and machine.has("compiler")), reason="needs a compiler for x86-64")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_every_product_is_added_by_one_instruction(level: str, tmp_path: Path) -> None:
    """GCC contracts some loops and not others where it is tuned to avoid chains of sums, as by this parameter."""
    out = tmp_path / "few_rows.s"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    tuned = "--param=avoid-fma-max-bits=512"
    flags = ["-O3", "-std=c++20", "-ffp-contract=fast", f"-march={level}", tuned, *includes, "-S", "-o", str(out)]
    subprocess.run([machine.compiler(), *flags, str(CSRC / "products" / "few_rows.cpp")], check=True)
    code = out.read_text()
    assert code.count("vfmadd") > 500
    assert "mulps" not in code
