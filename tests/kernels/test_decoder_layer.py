"""The passes between a decoder layer's products: against float64, PyTorch's own roundings, and wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rolltree.kernels import dispatch, use_backend
from rolltree.kernels.decoder_layer import add_rms_norm_, rotate_and_store_

BACKENDS = [
    pytest.param("reference"),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not dispatch.load_library("cpu"), reason="the C++ kernels are not built")
    ),
]
SHAPES = [(1, 8), (1, 128), (3, 100), (64, 256), (5, 7), (130, 576), (2, 1024), (2, 5000)]


def oracle_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def near(out: Tensor, expected: Tensor, scale: Tensor) -> None:
    """Within four roundings of ``scale``."""
    assert out.dtype == torch.float32
    assert ((out.double() - expected).abs() <= 4 * 2**-23 * scale + 1e-38).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e15])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_of_a_sum(backend: Any, shape: tuple[int, int], magnitude: float) -> None:
    torch.manual_seed(shape[1])
    residual, x = torch.randn(2, *shape) * magnitude
    weight, eps = torch.randn(shape[1]), 1e-6
    total = residual + x
    with use_backend(backend):
        out = add_rms_norm_(residual, x, weight, eps)
        again = add_rms_norm_(residual, None, weight, eps)
    assert torch.equal(residual, total)
    assert torch.equal(again, out)
    expected = oracle_norm(total, weight, eps)
    near(out, expected, expected.abs())


def heads(rows: int, heads: int, kv_heads: int, dim: int, pages: int = 7, page: int = 16) -> dict[str, Any]:
    torch.manual_seed(dim)
    angle = torch.rand(rows, dim // 2).repeat(1, 2) * 6
    return {
        "q": torch.randn(rows, heads, dim),
        "k": torch.randn(rows, kv_heads, dim),
        "v": torch.randn(rows, kv_heads, dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "slots": torch.randperm(pages * page)[:rows],
        "k_pages": torch.zeros(pages, page, kv_heads, dim),
        "v_pages": torch.zeros(pages, page, kv_heads, dim),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(1, 4, 2, 32), (33, 6, 2, 8), (20, 3, 3, 10), (16, 2, 1, 128)])
def test_heads_are_turned_and_stored(backend: Any, shape: tuple[int, int, int, int], normed: bool) -> None:
    given = heads(*shape)
    before = {name: tensor.clone() for name, tensor in given.items()}
    norms: dict[str, Any] = {}
    if normed:
        norms = {"q_weight": torch.randn(shape[3]), "k_weight": torch.randn(shape[3]), "eps": 1e-6}
    with use_backend(backend):
        rotate_and_store_(**given, **norms)
    cos, sin = (given[name].double()[:, None] for name in ("cos", "sin"))
    for name, out in (("q", given["q"]), ("k", given["k_pages"].view(-1, *shape[2:])[given["slots"]])):
        x = before[name].double()
        if normed:
            x = oracle_norm(x, norms[f"{name}_weight"], norms["eps"])
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), -1)
        near(out, x * cos + turned * sin, (x * cos).abs() + (turned * sin).abs())
    values = given["v_pages"].view(-1, *shape[2:])
    assert torch.equal(values[given["slots"]], given["v"])
    assert torch.equal(given["k"], before["k"])
    untouched = torch.ones(len(values), dtype=torch.bool).index_fill_(0, given["slots"], False)
    assert not values[untouched].any()
    assert not given["k_pages"].view(values.shape)[untouched].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_the_same_in_any_batch(backend: Any) -> None:
    given, many = heads(40, 4, 2, 32), torch.randn(600, 256)
    weight, norms = torch.randn(256), {"q_weight": torch.randn(32), "k_weight": torch.randn(32), "eps": 1e-6}
    alone = {name: t[7:8].clone() if name in ("q", "k", "v", "cos", "sin", "slots") else t for name, t in given.items()}
    with use_backend(backend):
        assert torch.equal(
            add_rms_norm_(many.clone(), many, weight, 1e-6)[7],
            add_rms_norm_(many[7:8].clone(), many[7:8], weight, 1e-6)[0],
        )
        rotate_and_store_(**alone, **norms)
        key = alone["k_pages"].view(-1, 2, 32)[alone["slots"]].clone()
        rotate_and_store_(**given, **norms)
    assert torch.equal(given["q"][7:8], alone["q"])
    assert torch.equal(given["k_pages"].view(-1, 2, 32)[alone["slots"]], key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_row(backend: Any) -> None:
    x = torch.randn(3, 64)
    x[1, 5], x[2, 9] = torch.inf, torch.nan
    with use_backend(backend):
        out = add_rms_norm_(x, None, torch.ones(64), 1e-6)
    assert out[0].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isnan().all()


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="PyTorch sums in eight lanes with AVX"
)
@pytest.mark.skipif(not dispatch.load_library("cpu"), reason="the C++ kernels are not built")
def test_every_rounding_is_pytorchs() -> None:
    """So the layers that generation runs answer the bits of those that are trained."""
    for shape in SHAPES:
        torch.manual_seed(0)
        x, weight = torch.randn(shape), torch.randn(shape[1])
        results = []
        for backend in ("reference", "cpu"):
            with use_backend(backend):  # type: ignore[arg-type]
                results.append(add_rms_norm_(x.clone(), x, weight, 1e-6))
        assert shape[1] < 8 or torch.equal(*results), shape
    for dim in (8, 32, 64, 80, 128):
        turned = []
        for backend in ("reference", "cpu"):
            given = heads(9, 4, 2, dim)
            with use_backend(backend):  # type: ignore[arg-type]
                rotate_and_store_(**given, q_weight=torch.ones(dim), k_weight=torch.arange(dim) / 7, eps=1e-5)
            turned.append(torch.cat([given["q"].flatten(), given["k_pages"].flatten()]))
        assert torch.equal(*turned), dim


WRONG = [
    ("residual", torch.randn(4, 9), "residual"),
    ("residual", torch.randn(8, 4).T, "contiguous"),
    ("residual", torch.randn(4, 8).bfloat16(), "fp32"),
    ("x", torch.randn(3, 8), "x must be"),
    ("weight", torch.randn(9), "weight must be"),
    ("eps", -1.0, "eps"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_arguments_of_the_norm(name: str, value: Any, message: str) -> None:
    right = {"residual": torch.randn(4, 8), "x": torch.randn(4, 8), "weight": torch.randn(8), "eps": 1e-6}
    with pytest.raises((ValueError, TypeError), match=message):
        add_rms_norm_(**{**right, name: value})


WRONG_HEADS = [
    ("q", torch.randn(4, 4, 31), "even"),
    ("k", torch.randn(4, 2, 16), "k must be"),
    ("v", torch.randn(4, 3, 32), "v must be"),
    ("cos", torch.randn(5, 32), "cos must be"),
    ("slots", torch.tensor([0, 1, 2, 7 * 16]), "slots must be in"),
    ("slots", torch.tensor([0, 1, 2, -1]), "slots must be in"),
    ("slots", torch.tensor([0, 1, 2, 3], dtype=torch.int32), "int64"),
    ("k_pages", torch.zeros(7, 16, 2, 64)[..., :32], "contiguous"),
    ("k_weight", torch.randn(16), "k_weight must be"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_HEADS)
def test_wrong_arguments_of_the_turn(name: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rotate_and_store_(**{**heads(4, 4, 2, 32), name: value})
