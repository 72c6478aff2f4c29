"""Kernels that sampling and training share on a GPU: a row has the same bits whatever the other rows are."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import DecodePlan, machine, sample_tokens, tree_attention, tree_decode_attention, use_backend
from rolltree.kernels.layer_ops import rms_norm, silu_mul
from rolltree.kernels.linear import linear
from rolltree.kernels.linear import triton as backend
from rolltree.kernels.linear.cancelling import cancelling
from rolltree.kernels.linear.tiles import Order, Tile, order_of, tiles_for
from rolltree.kernels.linear_logprob import logprob_from_logits
from rolltree.kernels.linear_logprob.head import Head
from rolltree.kernels.linear_logprob.logits import score_rows

from ..support.launches import launches
from .on_device import device_of, needs_triton

pytestmark = needs_triton

ROWS = (1, 3, 64, 257)
SHAPES = [(1, 1), (7, 33), (65, 64), (130, 577)]  # width, depth
DTYPES = (torch.float32, torch.bfloat16)


def operands(N: int, K: int, dtype: torch.dtype, rows: int = ROWS[-1] + 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [rows, K], weight [N, K] and bias [N]."""
    random = torch.Generator().manual_seed(N * K)
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((rows, K), (N, K), (N,)))
    return tuple(t.to(device_of("triton"), dtype) for t in (x, weight, bias))  # type: ignore[return-value]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The kernel's sums in PyTorch, then the bias. The interpreter adds blocks of the depth, a GPU one number each."""
    size = order_of(*weight.shape, x.dtype).block if machine.interpreting() else 1
    total = torch.zeros(len(x), len(weight), device=x.device)
    for rows, columns in zip(x.float().split(size, 1), weight.float().split(size, 1), strict=True):
        total += rows @ columns.T
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=6)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_a_row_does_not_see_the_others(N: int, K: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = operands(N, K, dtype)
    given = bias if biased else None
    with use_backend("triton"):
        whole = linear(x, weight, given)
        for rows in ROWS:
            assert torch.equal(linear(x[5 : 5 + rows], weight, given), whole[5 : 5 + rows]), rows
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    error, theirs = ((t.double() - exact).abs().max() for t in (whole, plain(x, weight, given)))
    assert error <= 2 * theirs + 2**-22 * exact.abs().max()


def test_a_split_along_the_depth_has_other_bits() -> None:
    """The test above fails if the sums along the depth depend on the number of rows."""
    x, weight, _ = operands(130, 577, torch.float32, 3)
    with use_backend("triton"):
        parts = [
            linear(x[:, some].contiguous(), weight[:, some].contiguous()) for some in (slice(288), slice(288, 577))
        ]
        assert not torch.equal(sum(parts), linear(x, weight))


@pytest.mark.parametrize("depth", [16, 2040, 4096])
def test_no_program_shares_a_sum(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many programs as tiles of the result, in each part of the depth, however deep the sums are."""
    grids: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **options: grids.append((grid, options))

    monkeypatch.setattr(backend, "linear_kernel", Kernel())
    monkeypatch.setattr(backend, "add_kernel", Kernel())
    monkeypatch.setattr(backend, "agreeing", lambda order, depth, dtype, _: tiles_for(order, dtype, depth))
    for rows in ROWS:
        backend.linear(torch.empty(rows, depth).bfloat16(), torch.empty(200, depth).bfloat16(), None)
    orders = {(of["DEPTH"], of["PARTS"]) for _, of in grids if "DEPTH" in of}
    assert len(orders) == 1  # one for all numbers of rows
    found = [(grid, of) for grid, of in grids if "DEPTH" in of]
    for (grid, of), rows in zip(found, ROWS, strict=True):
        parts = of["PARTS"] if of["APART"] else 1
        assert grid == (-(-rows // of["ROWS"]) * -(-200 // of["COLUMNS"]), parts)
    assert len({(of["ROWS"], of["COLUMNS"]) for _, of in found}) > 1  # but not one tile


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("depth", [96, 200])
@pytest.mark.parametrize("parts", [1, 4])
def test_tiles_have_the_same_bits(parts: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sums that cancel; a tile with another order is named and not used, and parts are added in their order."""
    order, device = Order(16, parts), device_of("triton")
    choices = tiles_for(order, torch.bfloat16, depth)
    backend.agreeing.cache_clear()
    assert backend.agreeing(order, depth, torch.bfloat16, device) == choices
    x, weight, bias = cancelling(70, 130, depth, torch.bfloat16, device)
    expected = backend.by_tile(x, weight, order, choices[0])
    size = backend.part_of(order, depth)
    total = torch.zeros_like(expected)
    for begin in range(0, depth, size):
        some = slice(begin, begin + size)
        total += backend.by_tile(x[:, some].contiguous(), weight[:, some].contiguous(), Order(16, 1), choices[0])
    assert torch.equal(total, expected)
    biased = backend._launch(x, weight, bias, torch.empty_like(expected), order, choices[0])
    assert torch.equal(biased, expected + bias.float())
    other = backend.by_tile(x, weight, Order(32, 2), choices[0])
    assert (other - expected).abs().max() < 1e-3
    assert not torch.equal(other, expected)

    def wrong(x: Tensor, weight: Tensor, order: Order, tile: Tile) -> Tensor:
        return other if tile == choices[-1] else expected

    monkeypatch.setattr(backend, "by_tile", wrong)
    backend.agreeing.cache_clear()
    logged: list[Any] = []
    monkeypatch.setattr(backend._log, "warning", lambda *message: logged.append(message))
    try:
        assert backend.agreeing(order, depth, torch.bfloat16, device) == choices[:-1]
        assert logged[0][1] == choices[-1]
    finally:
        backend.agreeing.cache_clear()


def test_few_rows_take_the_smallest_tile_and_many_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "agreeing", lambda order, depth, dtype, _: tiles_for(order, dtype, depth))
    monkeypatch.setattr(backend.machine, "gpu_processors", lambda _: 132)

    def chosen(width: int, depth: int, rows: int) -> tuple[int, int, bool]:
        order = order_of(width, depth, torch.bfloat16)
        tile = backend.tile_of(order, width, depth, torch.bfloat16, rows, torch.device("cpu"))
        return tile.rows, tile.columns, tile.apart

    assert chosen(151936, 1024, 64) == chosen(4096, 1024, 1) == (64, 64, False)
    assert chosen(4096, 1024, 12288) == chosen(151936, 4096, 2048) == (128, 256, False)
    assert chosen(1024, 3072, 256) == (64, 64, True)
    assert chosen(1024, 3072, 12288) == (128, 128, False)


def test_gradients_and_layouts() -> None:
    leaves = [t.requires_grad_() for t in operands(20, 24, torch.float32, 6)]
    with use_backend("triton"):
        out = linear(leaves[0].view(2, 3, 24), *leaves[1:])
        found = torch.autograd.grad((out**2).sum(), leaves)
        across = linear(leaves[0].T.contiguous().T, leaves[1].T.contiguous().T, leaves[2])
        assert torch.equal(across, out.view(6, 20))
        assert linear(leaves[0][:0], leaves[1]).shape == (0, 20)
    want = torch.autograd.grad((torch.nn.functional.linear(*leaves) ** 2).sum(), leaves)
    for got, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(got, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_do_not_see_other_rows(dtype: torch.dtype) -> None:
    """The bits of sampling and of scoring differ from each other, so sampled tokens are scored too (`score_rows`)."""
    hidden, weight, _ = operands(203, 48, dtype)
    weight *= 0.3
    numbers = torch.arange(len(hidden), device=hidden.device)
    temperature = 0.5 + (numbers % 3).float() / 2

    def drawn(rows: slice) -> tuple[Any, Any]:
        logits, own = linear(hidden[rows], weight).float(), numbers[rows]
        few = sample_tokens(logits, temperature=temperature[rows], seed=own, step=torch.zeros_like(own))
        return few, logprob_from_logits(logits, few.token, temperature=temperature[rows], want=("entropy",))

    with use_backend("triton"):
        whole, scored = drawn(slice(None))
        for rows in ROWS:
            some = slice(5, 5 + rows)
            few, again = drawn(some)
            assert torch.equal(few.token, whole.token[some])
            assert torch.equal(few.logprob, whole.logprob[some])
            assert torch.equal(few.entropy, whole.entropy[some])
            assert torch.equal(again.logprob, scored.logprob[some])
            assert torch.equal(again.entropy, scored.entropy[some])
    torch.testing.assert_close(whole.logprob, scored.logprob, rtol=1e-5, atol=1e-5)
    assert not torch.equal(whole.logprob, scored.logprob)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_do_not_see_other_rows(dtype: torch.dtype) -> None:
    x, _, weight = operands(50, 50, dtype)
    with use_backend("triton"):
        norm, unit = rms_norm(x, weight, 1e-6), silu_mul(x, x.flip(1).contiguous())
        for rows in ROWS:
            own = x[5 : 5 + rows]
            assert torch.equal(rms_norm(own, weight, 1e-6), norm[5 : 5 + rows])
            assert torch.equal(silu_mul(own, own.flip(1).contiguous()), unit[5 : 5 + rows])


SHARED, PAGE = 70, 16
"""Keys of the node that all rows share, and of a page."""


def decoded(rows: list[int], q: Tensor, pages: Tensor) -> Tensor:
    """Return the attention of some of the rows: 7 r + 1 keys of its own follow the shared ones of row r."""
    lengths, count, shared = [7 * r + 1 for r in rows], len(rows), list(range(-(-SHARED // PAGE)))
    own = [[20 + 4 * r + i for i in range(-(-length // PAGE))] for r, length in zip(rows, lengths, strict=True)]
    indptr = [0, *np.cumsum([len(shared), *map(len, own)])]
    arrays = [
        indptr,
        [*shared, *(page for of_row in own for page in of_row)],
        [0] * (count + 1),
        [SHARED, *lengths],
        [0, *[SHARED] * count],
        [0, *range(count)],
        [count, *range(1, count + 1)],
        [SHARED + n - 1 for n in lengths],
    ]
    plan = DecodePlan.from_host([np.array(a, np.int32) for a in arrays], q.device)
    return tree_decode_attention(q[rows], pages[0], pages[1], plan, scale=0.25)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_rows_do_not_see_others(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    q, pages = torch.randn(8, 4, 16, generator=random), torch.randn(2, 60, PAGE, 2, 16, generator=random)
    q, pages = (t.to(device_of("triton"), dtype) for t in (q, pages))
    with use_backend("triton"):
        whole = decoded(list(range(8)), q, pages)
        for rows in ([0], [3], [1, 4, 7], [5, 6]):
            assert torch.equal(decoded(rows, q, pages), whole[rows])


def test_trained_attention_has_another_order_than_decoding() -> None:
    """So backend ``invariant`` has another order (test_path_chunks.py); once this fails, it needs none."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHARED, heads, 16, generator=random).to(device_of("triton")) for heads in (4, 2, 2))
    pages = torch.zeros(2, -(-SHARED // PAGE) * PAGE, 2, 16, device=q.device)
    pages[0, :SHARED], pages[1, :SHARED] = k, v
    cut = 33  # a node ends here in the cache
    places = [[0, 3, 6], [0, 1, 2, 2, 3, 4], [0, cut % PAGE]]
    arrays = [*places, [cut, SHARED - cut], [0, cut], [0, 0], [1, 1], [SHARED - 1]]
    plan = DecodePlan.from_host([np.array(a, np.int32) for a in arrays], q.device)
    k_pages, v_pages = pages.view(2, -1, PAGE, 2, 16)
    with use_backend("triton"):
        trained = tree_attention(q, k, v, torch.full((SHARED,), SHARED, dtype=torch.int32, device=q.device), scale=0.25)
        (sampled,) = tree_decode_attention(q[-1:], k_pages, v_pages, plan, scale=0.25)[0]
    torch.testing.assert_close(sampled, trained[-1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(sampled, trained[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_the_head_are_the_product_of_one_order(dtype: torch.dtype) -> None:
    """In fp32, into tiles of any stride, for any rows; the head's own product without the backend has other bits."""
    hidden, weight, _ = operands(203, 96, dtype)
    head = Head(weight, None, None, torch.float32)
    whole = torch.empty(len(hidden), 208, device=hidden.device)[:, :203]
    with use_backend("invariant"):
        head.logits(hidden, whole)
        for rows in ROWS:
            own = torch.empty(rows, 203, device=hidden.device)
            assert torch.equal(head.logits(hidden[5 : 5 + rows], own), whole[5 : 5 + rows])
    exact, plain = hidden.double() @ weight.double().T, torch.empty_like(whole)
    head.logits(hidden, plain)
    assert not torch.equal(plain, whole)
    assert (whole.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 2**-22 * exact.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("V", [96, 203])
def test_drawn_tokens_are_scored_as_they_are_trained(V: int) -> None:
    hidden, weight, _ = operands(V, 48, torch.float32)
    target = torch.arange(len(hidden), device=hidden.device) % V
    temperature = 0.5 + (target % 3).float() / 2
    with use_backend("triton"):
        logits = linear(hidden, 0.3 * weight)
        whole = logprob_from_logits(logits, target, temperature=temperature, want=("entropy",)).logprob
        target[3], whole[3] = -1, torch.nan  # of a row that failed
        for rows in ROWS:
            own = slice(2, 2 + rows)
            scored = score_rows(logits[own], target[own], temperature[own])
            assert torch.equal(scored.nan_to_num(7.0), whole[own].nan_to_num(7.0))
            both = score_rows(logits[own], target[own], torch.stack((torch.ones_like(scored), temperature[own]), 1))
            assert torch.equal(both[:, 1].nan_to_num(7.0), scored.nan_to_num(7.0))
            ones = score_rows(logits[own], target[own], torch.ones_like(scored))
            assert torch.equal(both[:, 0].nan_to_num(7.0), ones.nan_to_num(7.0))
        if machine.interpreting():
            of_both = torch.stack((torch.ones_like(temperature), temperature), 1)
            names = launches(lambda: score_rows(logits, target, of_both))
            assert names.count("_statistics") == 1
            assert not {"aten::stack", "aten::cat"} & set(names)  # as of two passes
