"""Attention on a CPU: a row has the same bits in training and decoding, in a tree and on its path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels import DecodePlan, tree_attention, tree_decode_attention
from rolltree.kernels.libraries import load_library

pytestmark = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")

T = 260
"""Tokens of the path."""
SHAPES = [(6, 2, 64), (3, 3, 20), (4, 1, 128), (8, 4, 32)]
OPTIONS = [{}, {"window": 70}, {"softcap": 5.0}]


def path(shape: tuple[int, int, int], dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, dim = shape
    random = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(T, n, dim, generator=random) for n in (heads, kv_heads, kv_heads))
    return (scale * q).to(dtype), k.to(dtype), v.to(dtype)


def in_a_tree(q: Tensor, k: Tensor, v: Tensor, random: np.random.Generator, **options: object) -> Tensor:
    """Return the path's rows of a tree in which siblings lie between its parts."""
    cuts = np.sort(random.choice(np.arange(1, T), 4, replace=False)).tolist()
    parts, of_path, ends, positions, at = [], [], [], [], 0
    sizes = [*random.integers(1, 90, 4).tolist(), 0]
    total = T + sum(sizes)
    for begin, end, sibling in zip([0, *cuts], [*cuts, T], sizes, strict=True):
        parts.append([t[begin:end] for t in (q, k, v)])
        of_path += range(at, at + end - begin)
        ends += [total] * (end - begin)
        positions += range(begin, end)
        at += end - begin
        other = torch.Generator().manual_seed(end)
        parts.append([torch.randn(sibling, *t.shape[1:], generator=other).to(t.dtype) for t in (q, k, v)])
        ends += [at + sibling] * sibling
        positions += range(end, end + sibling)
        at += sibling
    given = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    where = {"position": torch.tensor(positions, dtype=torch.int32)} if "window" in options else {}
    return tree_attention(*given, torch.tensor(ends, dtype=torch.int32), **where, **options)[of_path]  # type: ignore[arg-type]


def decoded(q: Tensor, k: Tensor, v: Tensor, random: np.random.Generator, **options: object) -> tuple[Tensor, int]:
    """Return the last rows of the path, decoded over nodes that begin anywhere in pages, and the first of them."""
    page = int(random.choice([8, 16, 32]))
    bounds = [0, *np.sort(random.choice(np.arange(1, T), 5, replace=False)).tolist(), T]
    offsets = random.integers(0, page, len(bounds) - 1).tolist()
    nodes = list(zip(bounds, bounds[1:], offsets, strict=False))
    slots, indptr = [], [0]
    for begin, end, offset in nodes:
        slots.append(indptr[-1] * page + offset + np.arange(end - begin))
        indptr.append(indptr[-1] + (offset + end - begin + page - 1) // page)
    pages = torch.randperm(indptr[-1], generator=torch.Generator().manual_seed(1))
    places = torch.from_numpy(np.concatenate(slots))
    k_pages, v_pages = (torch.full((indptr[-1], page, *k.shape[1:]), 9.0, dtype=k.dtype) for _ in range(2))
    for into, values in ((k_pages, k), (v_pages, v)):
        into.view(-1, *k.shape[1:])[pages[places // page] * page + places % page] = values
    first = bounds[-2]
    rows = T - first
    count = len(nodes)
    arrays = [
        indptr,
        pages.tolist(),
        offsets,
        np.diff(bounds),
        bounds[:-1],
        [0] * count,
        [rows] * count,
        range(first, T),
    ]
    plan = DecodePlan.from_host([np.array(a, np.int32) for a in arrays], torch.device("cpu"))
    scale = q.shape[-1] ** -0.5
    return tree_decode_attention(q[first:].contiguous(), k_pages, v_pages, plan, scale=scale, **options)[0], first  # type: ignore[arg-type]


@pytest.mark.slow(but=32)
@pytest.mark.check(but=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_no_bit_depends_on_tiles_nodes_or_pages(
    shape: tuple[int, int, int], options: dict[str, object], dtype: torch.dtype, scale: float
) -> None:
    q, k, v = path(shape, dtype, scale)
    where = {"position": torch.arange(T, dtype=torch.int32)} if "window" in options else {}
    flat = tree_attention(q, k, v, torch.full((T,), T, dtype=torch.int32), **where, **options)  # type: ignore[arg-type]
    random = np.random.default_rng(shape[2])
    for _ in range(4):
        assert torch.equal(in_a_tree(q, k, v, random, **options), flat)
        rows, first = decoded(q, k, v, random, **options)
        assert torch.equal(rows, flat[first:])


def test_a_later_maximum_scales_by_a_power_of_two() -> None:
    """Scores that rise and fall by far more than the exponents of fp32 hold."""
    q, k, v = path((2, 1, 32), torch.float32, 1.0)
    k = k * torch.linspace(-400, 400, T)[:, None, None].sin() * 300
    flat = tree_attention(q, k, v, torch.full((T,), T, dtype=torch.int32))
    random = np.random.default_rng(0)
    for _ in range(6):
        assert torch.equal(in_a_tree(q, k, v, random), flat)
        rows, first = decoded(q, k, v, random)
        assert torch.equal(rows, flat[first:])
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(flat.double(), exact, rtol=1e-3, atol=1e-3)


def test_another_order_of_keys_is_seen() -> None:
    """Otherwise the bits above would be equal whatever the order of sums."""
    q, k, v = path((6, 2, 64), torch.float32, 1.0)
    order = torch.randperm(T - 1, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([order, torch.tensor([T - 1])])
    ends = torch.full((T,), T, dtype=torch.int32)
    last, other = (tree_attention(q, k[o], v[o], ends)[-1] for o in (torch.arange(T), mixed))
    torch.testing.assert_close(last, other, rtol=1e-4, atol=1e-5)
    assert not torch.equal(last, other)
