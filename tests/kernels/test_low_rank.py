"""Low-rank products of rows with different adapters: against float64, peft's roundings, and in any order of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels import use_backend
from rolltree.kernels.libraries import load_library
from rolltree.kernels.linear import linear
from rolltree.kernels.low_rank import Adapters, LowRank, Runs, add_low_rank_
from rolltree.kernels.low_rank.runs import TILE, tiles_of

from .on_device import device_of, interpret_some, needs_triton

needs_cpp = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=needs_cpp),
    pytest.param("triton", marks=needs_triton),
]
OWN_ORDER = BACKENDS[1:]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cuts bf16 off

CASES = [  # ranks, with 0 for an adapter without a part; width, depth, rows
    ((1,), 1, 1, 1),
    ((4, 0, 9), 33, 50, 20),
    ((32, 8, 3, 17), 70, 129, 2 * TILE + 5),
    ((64, 1), 130, 7, 500),
    ((0, 0), 5, 6, 4),
]
INTERPRETED = [0, 1, 2, 4]


def made(ranks: tuple[int, ...], width: int, depth: int, rows: int, dtype: torch.dtype) -> Any:
    """Adapters, the number of each row's (-1: none), the rows, and what their products are added to."""
    drawn = torch.Generator().manual_seed(width + depth)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    of = [LowRank(random(r, depth), random(width, r), 32 / r) if r else None for r in ranks]
    number = np.sort(np.random.default_rng(rows).integers(-1, len(ranks), rows))
    return of, number, random(rows, depth), random(rows, width)


def added(backend: Any, of: Any, number: Any, x: Tensor, out: Tensor) -> Tensor:
    where = device_of(backend)
    moved = [None if one is None else LowRank(one.a.to(where), one.b.to(where), one.scale) for one in of]
    out = out.to(where, copy=True)
    with use_backend(backend):
        add_low_rank_(out, x.to(where), Adapters(moved, out.new_empty(out.shape[1], x.shape[1])), Runs.of(number))
    return out.cpu()


def exact(of: Any, number: Any, x: Tensor, out: Tensor) -> Tensor:
    rows = [
        x.new_zeros(out.shape[1]).double() if n < 0 or of[n] is None
        else of[n].scale * (of[n].b.double() @ (of[n].a.double() @ row.double()))
        for n, row in zip(number.tolist(), x, strict=True)
    ]  # fmt: skip
    return out.double() + torch.stack(rows)


def error(got: Tensor, known: Tensor) -> float:
    return ((got.double() - known).norm() / known.norm()).item()


@pytest.mark.parametrize(("backend", "ranks", "width", "depth", "rows"), interpret_some(BACKENDS, CASES, INTERPRETED))
def test_no_further_from_float64_than_plain_pytorch(
    backend: Any, ranks: tuple[int, ...], width: int, depth: int, rows: int
) -> None:
    for dtype in (torch.float32, HALF if backend == "triton" else torch.bfloat16):
        given = made(ranks, width, depth, rows, dtype)
        known, got = exact(*given), added(backend, *given)
        assert error(got, known) <= 2 * error(added("reference", *given), known) + torch.finfo(dtype).eps / 2
        of, number, x, out = given
        without = [n < 0 or of[n] is None for n in number.tolist()]
        assert torch.equal(got[without], out[without])
        if len(of) > 1 and not all(without):  # the bound tells adapters apart
            assert error(added(backend, of, (number + 1) % len(of), x, out), known) > 0.1


@pytest.mark.parametrize("backend", OWN_ORDER)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_row_has_the_same_bits_among_any_others(backend: Any, dtype: torch.dtype) -> None:
    of, number, x, out = made((32, 8, 3, 17), 70, 129, 2 * TILE + 5, dtype)
    whole = added(backend, of, number, x, out)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(added(backend, of, number[order.numpy()], x[order], out[order]), whole[order])
    for row in range(0, len(x), 9):
        one = slice(row, row + 1)
        assert torch.equal(added(backend, of, number[one], x[one], out[one]), whole[one])


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 500])
def test_the_bits_of_pefts_modules_whose_products_are_in_a_fixed_order(dtype: torch.dtype, rows: int) -> None:
    """500 rows are more than a library's products begin with; the rank makes a scale that is no power of two."""
    of, _, x, out = made((12,), 70, 129, rows, dtype)
    got = added("cpu", of, np.zeros(rows, np.int64), x, out)
    assert torch.equal(got, out + linear(linear(x, of[0].a), of[0].b) * of[0].scale)


@pytest.mark.parametrize("backend", OWN_ORDER)
def test_weights_that_change_in_place_are_used(backend: Any) -> None:
    where = device_of(backend)
    one = LowRank(torch.randn(4, 9, device=where), torch.randn(6, 4, device=where), 2.0)
    adapters, x = Adapters([one], torch.empty(6, 9, device=where)), torch.randn(3, 9, device=where)
    one.b.zero_()
    out = torch.randn(3, 6, device=where)
    before = out.clone()
    with use_backend(backend):
        add_low_rank_(out, x, adapters, Runs.of(np.zeros(3, np.int64)))
    assert torch.equal(out, before)


def test_runs_are_neighbours_with_one_adapter_and_tiles_cover_them() -> None:
    runs = Runs.of(np.array([-1, 2, 2, 0, -1, -1, 0] + [1] * (2 * TILE + 1)))
    assert list(runs) == [(1, 3, 2), (3, 4, 0), (6, 7, 0), (7, 8 + 2 * TILE, 1)]
    tiles = tiles_of(runs)
    assert (tiles[:, 1] - tiles[:, 0]).tolist() == [2, 1, 1, TILE, TILE, 1]
    assert list(Runs.of(np.zeros(0, np.int64))) == []
    assert list(Runs.of(np.full(3, -1))) == []


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton)])
def test_tiles_without_rows_do_nothing(backend: Any) -> None:
    of, number, x, out = made((4, 9), 33, 50, 20, torch.float32)
    runs = Runs.of(number)
    tiles = torch.zeros(20, 3, dtype=torch.int32)
    tiles[: len(tiles_of(runs))] = torch.from_numpy(tiles_of(runs))
    padded, where = out.clone().to(device_of(backend)), device_of(backend)
    moved = [LowRank(one.a.to(where), one.b.to(where), one.scale) for one in of]
    with use_backend(backend):
        padded_runs = Runs(runs.rows, runs.numbers, tiles.to(where))
        add_low_rank_(padded, x.to(where), Adapters(moved, padded.new_empty(33, 50)), padded_runs)
    assert torch.equal(padded.cpu(), added(backend, of, number, x, out))


def test_wrong_arguments_are_named() -> None:
    of, number, x, out = made((4, 9), 33, 50, 20, torch.float32)
    adapters, runs = Adapters(of, torch.empty(33, 50)), Runs.of(number)
    for wrong, message in (
        ((out, x[:, 1:], adapters, runs), r"x must be \[20, 50\]"),
        ((out, x.bfloat16(), adapters, runs), "x must be fp32"),
        ((out.double(), x.double(), adapters, runs), "adapters are torch.float32 and rows torch.float64"),
        ((out.T.contiguous().T, x, adapters, runs), "out and x must be contiguous"),
        ((out, x, adapters, Runs(19, runs.numbers)), "runs are of 19 rows, and there are 20"),
        ((out, x, adapters, Runs(20, [0, 21, 0])), "rows 0 to 21 of adapter 0"),
        ((out, x, adapters, Runs(20, [0, 5, 2])), "rows 0 to 5 of adapter 2"),
        ((out, x, adapters, Runs(20, [4, 5, 0, 3, 6, 1])), "rows 3 to 6 of adapter 1"),
    ):
        with pytest.raises(ValueError, match=message):
            add_low_rank_(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="b must be"):
        Adapters([LowRank(of[0].a, of[0].b[:, 1:], 1.0)], torch.empty(33, 50))
