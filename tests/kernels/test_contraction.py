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

ROOT = Path(__file__).parents[2]
PARTS = [ROOT / name for name in ("kernels", "engine", "bench")]


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


def makers_of_options(files: list[ast.Module]) -> set[str]:
    """Return the functions that return options, as dictionaries, among them what is contracted."""
    makers = [
        node
        for file in files
        for node in ast.walk(file)
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or ast.Constant(None)).startswith("dict")
    ]
    saying = {node.name for node in makers if "enable_fp_fusion" in ast.unparse(node)}
    while more := {node.name for node in makers if calls(node) & saying} - saying:
        saying |= more
    return saying


def calls(node: ast.AST) -> set[str]:
    """Return the names of the functions and methods that are called in ``node``."""
    called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else ast.unparse(f) for f in called}


def launches_in(file: ast.Module, makers: set[str]) -> list[tuple[str, bool]]:
    """Return the kernel of each launch in ``file``, and whether the launch says what is contracted: itself, or by
    options that one of ``makers`` returns, or that are assigned in the same function."""
    functions = [node for node in ast.walk(file) if isinstance(node, ast.FunctionDef)]

    def says(options: ast.expr, at: ast.Call) -> bool:
        names = {node.id for node in ast.walk(options) if isinstance(node, ast.Name)}
        within = [f for f in functions if f.lineno <= at.lineno <= (f.end_lineno or 0)]
        assigned = [node for f in within for node in ast.walk(f) if isinstance(node, ast.Assign) and names & made(node)]
        return any("enable_fp_fusion" in ast.unparse(n) or calls(n) & makers for n in (options, *assigned))

    found = []
    for node in ast.walk(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            spread = [word.value for word in node.keywords if word.arg is None]
            said = any(word.arg == "enable_fp_fusion" for word in node.keywords)
            found.append((ast.unparse(node.func.value), said or any(says(options, node) for options in spread)))
    return found


def made(node: ast.Assign) -> set[str]:
    return {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def kernels_of(files: list[ast.Module]) -> set[str]:
    """Return Triton's functions that no other such function calls, and that write something or are named a kernel."""
    jitted = [
        node
        for file in files
        for node in ast.walk(file)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    launched = {f.name for f in jitted if f.name.endswith("_kernel") or any("store" in name for name in calls(f))}
    return launched - {name for f in jitted for name in calls(f)}


def test_every_launch_says_whether_products_are_contracted() -> None:
    """Triton's default has changed between its versions, so that every launch names it. Every kernel is launched by its
    own name, so that none is overlooked."""
    sources = {path.relative_to(ROOT): path.read_text() for part in PARTS for path in part.rglob("*.py")}
    files = {path: ast.parse(source) for path, source in sources.items() if "import triton" in source}
    makers, kernels = makers_of_options(list(files.values())), kernels_of(list(files.values()))
    launched = [(path, name, said) for path, file in files.items() for name, said in launches_in(file, makers)]
    assert kernels - {name for _, name, _ in launched} == set()
    assert [f"{path}: {name}" for path, name, said in launched if name in kernels and not said] == []
    assert len(kernels) > 40


def test_a_launch_that_does_not_say_it_is_found() -> None:
    file = ast.parse("""
def _options(n) -> dict[str, bool]:
    return {"enable_fp_fusion": n > 1}

class Of:
    def given(self) -> dict[str, int]:
        return {"BLOCK": 3}
    def more(self) -> dict[str, int]:
        return {"BLOCK": 3, **_options(4)}

def run(x):
    some = {"enable_fp_fusion": False}
    other = {"BLOCK": 2}
    a_kernel[(1,)](x, enable_fp_fusion=True)
    b_kernel[(1,)](x, **some)
    c_kernel[(1,)](x, **_options(3), **other)
    d_kernel[(1,)](x, **Of().more())
    e_kernel[(1,)](x)
    f_kernel[(1,)](x, **other)
    g_kernel[(1,)](x, **Of().given())

def elsewhere(x, some):
    h_kernel[(1,)](x, **some)
""")
    assert dict(launches_in(file, makers_of_options([file]))) == {f"{n}_kernel": n in "abcd" for n in "abcdefgh"}
