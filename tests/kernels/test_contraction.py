"""Attention for the largest scores, where a product and a sum become one multiply-add, as on a GPU.

Triton's interpreter rounds every product. Here it also keeps the product that was not rounded, and adds to that.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels.tree_attention import reference, triton
from rolltree.kernels.tree_attention.reference import Scoring

from .on_device import needs_interpreter

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def contracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make float32 sums of products round once."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = {name: getattr(InterpreterBuilder, f"create_f{name}") for name in ("mul", "add", "sub")}

    def product(self: Any, left: Any, right: Any) -> Any:
        out = plain["mul"](self, left, right)
        if out.data.dtype == np.float32:
            out.set_attr("exact", left.data.astype(np.float64) * right.data)
        return out

    def sum_of(name: str, op: Any) -> Any:
        def summed(self: Any, left: Any, right: Any) -> Any:
            exact = [x.attr.get("exact") for x in (left, right)]
            out = plain[name](self, left, right)
            if out.data.dtype == np.float32 and any(e is not None for e in exact):
                first, second = (
                    (exact[0], right.data) if exact[0] is not None else (left.data.astype(np.float64), exact[1])
                )
                out.data = np.asarray(op(first, second), np.float32)
            return out

        return summed

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", product)
    monkeypatch.setattr(InterpreterBuilder, "create_fadd", sum_of("add", np.add))
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", sum_of("sub", np.subtract))


def scored(size: float, softcap: float | None, whole: bool) -> tuple[list[Tensor], Scoring, Tensor]:
    """Return q, k, v with scores of up to ``size``, positive in one head and negative in the other, and a gradient.

    Only the first dimension counts, with few bits, so that every product is exact. The tokens are a chain; with
    ``whole`` its last rows alone, to which whole blocks are visible.
    """
    random = torch.Generator().manual_seed(3)
    tokens, rows = 150, 20 if whole else 150
    q, k = torch.zeros(rows, 2, 16), torch.zeros(tokens, 1, 16)
    high = math.frexp(size)[1]
    q[..., 0] = 2.0 ** (high // 2) * torch.randint(1, 5, (rows, 2), generator=random) * torch.tensor([1.0, -1.0])
    k[..., 0] = 2.0 ** (high - high // 2 - 16) * torch.randint(2**12, 2**13, (tokens, 1), generator=random)
    v, grad = torch.randn(tokens, 1, 16, generator=random), torch.randn(rows, 2, 16, generator=random)
    end = torch.full((tokens,), tokens, dtype=torch.int32)
    return [q, k, v], Scoring(end, None, 1.0, None, softcap), grad


@needs_interpreter
@pytest.mark.usefixtures("contracted")
@pytest.mark.parametrize(
    ("size", "softcap", "whole"),
    [
        (1e4, None, True),
        *(pytest.param(size, None, size != 1e6, marks=pytest.mark.check) for size in (1e6, 2.0**23, 1e12)),
        (3e37, None, True),
        pytest.param(3e37, None, False, marks=pytest.mark.check),
        pytest.param(3e37, 1e36, True, marks=pytest.mark.check),
    ],
)
def test_largest_scores(size: float, softcap: float | None, whole: bool) -> None:
    tensors, scoring, grad = scored(size, softcap, whole)
    out, lse = triton.tree_attention_forward(*tensors, scoring)
    wide = [t.double() for t in tensors]
    want, want_lse = reference.tree_attention_forward(*wide, scoring)
    if softcap is None:  # with it the largest scores are equal but for rounding
        assert (out - want).abs().max() <= 1e-5 * want.abs().max()
    torch.testing.assert_close(lse.double(), want_lse, rtol=3e-7, atol=1e-5)
    assert out.isfinite().all()
    assert (out.abs() <= 1.001 * tensors[2].abs().max()).all()
    found = triton.tree_attention_backward(grad, *tensors, out, lse, scoring)
    exact = reference.tree_attention_backward(grad.double(), *wide, want, want_lse, scoring)
    for got, expected in zip(found, exact, strict=True):
        assert got.isfinite().all()
        if size <= 1e4:  # above, the rounding of lse shows in every probability of a row
            assert (got - expected).norm() <= 5e-3 * expected.norm()


def test_every_launch_says_whether_products_are_contracted() -> None:
    """Triton's default has changed between its versions, so that every launch names it."""
    launches = silent = 0
    for file in KERNELS.rglob("*.py"):
        source = file.read_text()
        says = {"options", "sizes", "launch", "tile"} if 'enable_fp_fusion": ' in source else set()
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            if not ast.unparse(node.func.value).endswith("_kernel"):
                continue
            words = {word.arg for word in node.keywords}
            spread = " ".join(ast.unparse(word.value) for word in node.keywords if word.arg is None)
            launches += 1
            silent += not ("enable_fp_fusion" in words or any(name in spread for name in says))
    assert launches > 30
    assert not silent
