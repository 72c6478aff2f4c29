"""Products of bf16 on a CPU: as exact as widening the operands, each row on its own, in a fixed order of sums."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rolltree.kernels import linear_logprob, use_backend
from rolltree.kernels.linear_logprob.head import Head, has_bf16_gemm

pytestmark = pytest.mark.skipif(
    not has_bf16_gemm(torch.empty(0)),
    reason="the C++ kernels are not built",
)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    head = Head(weight, None, None, torch.float32)
    assert head.bf16
    return head.logits(hidden, torch.full((len(hidden), len(weight)), torch.nan))


def operands(M: int, K: int, N: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(M * K + N)
    return tuple((scale * torch.randn(n, K, generator=random)).bfloat16() for n in (M, N))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (31, 33, 16), (32, 32, 32), (33, 64, 31), (65, 95, 97), (7, 128, 1000), (0, 8, 5), (100, 896, 333)],
)
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e15])
def test_no_further_from_fp64_than_widened_operands(shape: tuple[int, int, int], scale: float) -> None:
    hidden, weight = operands(*shape, scale)
    exact = hidden.double() @ weight.double().T
    magnitude = hidden.double().abs() @ weight.double().abs().T
    error = (logits(hidden, weight) - exact).abs()
    # fp32 sums of K products in any order: K units in the last place of the sum of magnitudes; the
    # processor's instructions flush subnormals
    assert (error <= shape[1] * 2**-24 * magnitude + shape[1] * 2**-126).all()


def test_rows_do_not_see_each_other() -> None:
    hidden, weight = operands(100, 96, 333)
    whole = logits(hidden, weight)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(hidden[order], weight), whole[order])
    assert torch.equal(logits(hidden[40:41], weight), whole[40:41])
    assert torch.equal(logits(hidden[10:77], weight), whole[10:77])


@pytest.mark.parametrize("stride", [50, 64])
def test_tiles_of_padded_rows_are_filled(stride: int) -> None:
    """As Triton's row kernels have them: rows of logits begin at multiples of 16 elements. Hidden and weight are slices
    too, and what lies between the rows stays as it is."""
    hidden, weight = operands(40, 36, 50)
    wide_hidden, wide_weight = torch.zeros(40, 61, dtype=torch.bfloat16), torch.zeros(50, 77, dtype=torch.bfloat16)
    wide_hidden[:, :36], wide_weight[:, :36] = hidden, weight
    tile = torch.full((40, stride), -7.0)
    Head(wide_weight[:, :36], None, None, torch.float32).logits(wide_hidden[:, :36], tile[:, :50])
    assert torch.equal(tile[:, :50], logits(hidden, weight))
    assert (tile[:, 50:] == -7.0).all()


def test_transposed_operands_are_copied() -> None:
    hidden, weight = operands(40, 36, 50)
    got = Head(weight.T.contiguous().T, None, None, torch.float32).logits(hidden.T.contiguous().T, torch.empty(40, 50))
    assert torch.equal(got, logits(hidden, weight))


def test_not_a_number_stays_in_its_row_and_column() -> None:
    hidden, weight = operands(40, 64, 50)
    hidden[3, 5], weight[7, 9], hidden[20, 1] = torch.nan, torch.nan, torch.inf
    bad = logits(hidden, weight).isnan()
    assert bad[3].all()
    assert bad[:, 7].all()
    assert bad.sum() == 50 + 40 - 1


def test_the_log_probability_is_that_of_the_reference() -> None:
    hidden, weight = operands(50, 40, 1003)
    target = torch.arange(50) * 7
    results = []
    for backend in ("cpu", "reference"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with use_backend(backend):
            out = linear_logprob(h, w, target)
            out.logprob.sum().backward()
        results.append((out.logprob.detach(), h.grad, w.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for got, want in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-4)


def one_more(sums: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return ``sums + x w`` rounded once: products of bf16 are exact, and a sum of two fp32 numbers in fp64 rounds to
    fp32 as the exact sum does."""
    return (sums.astype(np.float64) + np.multiply.outer(x, w).astype(np.float64)).astype(np.float32)


def in_order(hidden: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Return the sums of csrc/cpu/products/few_rows.cpp, or of few_rows_tiles.cpp where there are tiles, one by one."""
    x, w = (np.pad(t.float().numpy(), ((0, 0), (0, -t.shape[1] % 32))) for t in (hidden, weight))
    K, zeros = hidden.shape[1] + hidden.shape[1] % 2, np.zeros((len(x), len(w)), np.float32)
    total = zeros
    if torch.ops.rolltree_cpu.tiles():
        for k in range(0, x.shape[1], 32):
            halves = [zeros, zeros]
            for j in range(k, k + 32):
                halves[j % 2] = one_more(halves[j % 2], x[:, j], w[:, j])
            total = total + (halves[0] + halves[1])
        return total
    block = 1024 if K > 1024 else 512
    for first in range(0, K, block):
        part = zeros
        for k in range(first, min(first + block, K), 2):
            part = one_more(one_more(part, x[:, k + 1], w[:, k + 1]), x[:, k], w[:, k])
        total = part if first == 0 else total + part
    return total


@pytest.mark.skipif(
    has_bf16_gemm(torch.empty(0)) and torch.ops.rolltree_cpu.vector_bytes() == 16,
    reason="without AVX2 a product and its sum are rounded one after the other",
)
@pytest.mark.parametrize("depth", [1, 2, 31, 64, 511, 576, 1024, 1025, 1536, 2050])
@pytest.mark.parametrize("rows", [1, 5, 16, 70])
def test_the_order_of_sums_is_fixed(rows: int, depth: int) -> None:
    hidden, weight = operands(rows, depth, 53)
    assert np.array_equal(logits(hidden, weight).numpy(), in_order(hidden, weight))


@pytest.mark.check
@pytest.mark.skipif(
    has_bf16_gemm(torch.empty(0)) and not torch.ops.rolltree_cpu.pairs(), reason="this processor has no AVX-512 BF16"
)
def test_widened_pairs_have_the_sums_of_dot_products() -> None:
    """The processor's own instructions and their twin, which other processors run."""
    program = (
        "import sys, torch; from rolltree.kernels.linear_logprob.head import Head\n"
        "random = torch.Generator().manual_seed(0)\n"
        "for M, N, K in ((1, 40, 576), (9, 64, 1537), (70, 33, 100), (400, 50, 64)):\n"
        "    x, w = (torch.randn(n, K, generator=random).bfloat16() for n in (M, N))\n"
        "    out = Head(w, None, None, torch.float32).logits(x, torch.empty(M, N))\n"
        "    sys.stdout.buffer.write(out.numpy().tobytes())\n"
        "print(int(torch.ops.rolltree_cpu.pairs()))"
    )

    def sums(asked: str) -> bytes:
        environment = {**os.environ, "ROLLTREE_AMX": "off", "ROLLTREE_BF16": asked}
        return subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True).stdout

    dots, widened = sums(""), sums("widen")
    assert dots[:-2] == widened[:-2]
    assert (dots[-2:], widened[-2:]) == (b"1\n", b"0\n")
