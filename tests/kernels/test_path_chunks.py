"""Backend ``invariant`` of attention: chunks of keys along paths, and the same bits in sampling and training."""

from __future__ import annotations

import itertools
import threading
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltree.kernels import DecodePlan, dispatch, machine, tree_attention, tree_decode_attention, use_backend
from rolltree.kernels.tree_attention.path_blocks import path_blocks
from rolltree.kernels.tree_decode.items import CHUNK, QUERIES
from rolltree.kernels.tree_decode.path_chunks import path_chunks

from ..support.thinned import thinned
from ..support.trees import random_trees
from .on_device import device_of, needs_triton
from .test_tree_decode import forest, on_host

Ints = Any  # arrays of numpy


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("group", [1, 3, 8])
def test_items_cover_every_key_of_a_path_once(group: int, seed: int) -> None:
    """Each row's partial c is of one item, with the keys at positions 512 c and on of its path."""
    step = forest(seed, roots=2, chunk=(1, 700, 40)[seed % 3], longest=(90, 1300)[seed % 2], page=16)
    chunks = path_chunks(on_host(step.plan))
    indptr, ids, offset, _, position, *_, query = on_host(step.plan)
    items = chunks.items(group)
    assert len(items) == 1 + items[0, 0]
    assert (np.diff(items[1:, 2]) <= 0).all()  # the longest first
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, (place, slot, keys, first, row, rows, before, node) in enumerate(items[1:].tolist()):
        assert (place, slot, first) == (CHUNK * i, 0, CHUNK * before)
        assert 0 < keys <= CHUNK
        assert 0 < rows * group <= max(QUERIES, group)
        slots = []
        for p in range(first, first + keys):
            n = node
            while position[n] > p:
                n = chunks.parent[n]
            at = offset[n] + p - position[n]
            slots.append((int(ids[indptr[n] + at // step.page]), int(at % step.page)))
        for r in range(row, row + rows):
            assert (r, before) not in found
            found[r, before] = slots
    for r, keys_of_row in enumerate(step.keys):
        count = int(chunks.partial_begin[r + 1] - chunks.partial_begin[r])
        assert count == -(-len(keys_of_row) // CHUNK)
        seen = [slot for c in range(count) for slot in found.pop((r, c))]
        assert seen[: len(keys_of_row)] == keys_of_row  # an item may have later keys, which are not visible
        assert len(keys_of_row) == query[r] + 1
    assert not found


def columns(*lists: list[int]) -> list[Ints]:
    return [np.array(values, np.int32) for values in lists]


def test_plans_without_whole_paths_are_refused() -> None:
    length, position, begin, end, query = [1100, 10], [0, 1100], [0, 0], [2, 1], [1109, 1099]
    place = ([0, 1, 2], [0, 1], [0, 0])
    with pytest.raises(ValueError, match="rows of a node must be in the order of their positions, before its child"):
        path_chunks(columns(*place, length, position, begin, end, [1109, 100]))  # the row that ends there comes last
    with pytest.raises(ValueError, match="nodes that begin where their parents end, roots at 0"):
        path_chunks(columns(*place, length, [0, 1101], begin, end, query))
    with pytest.raises(ValueError, match="nodes that begin where their parents end, roots at 0"):
        path_chunks(columns(*place, length, [5, 1105], begin, end, query))
    chunks = path_chunks(columns(*place, length, position, begin, end, query))  # the row sees what the child's does
    assert chunks.partial_begin.tolist() == [0, 3, 6]
    assert [(c, r, n) for c, r, n in zip(chunks.chunk, chunks.row, chunks.rows, strict=True)] == [
        (0, 0, 2), (1, 0, 2), (2, 0, 1), (2, 1, 1),
    ]  # fmt: skip


def random_tree(lengths: tuple[int, ...], parents: tuple[int, ...]) -> tuple[Ints, list[Ints]]:
    """Return ``subtree_end`` of nodes in depth-first order, and the tokens of the path to the end of each."""
    begins = np.cumsum([0, *lengths])
    ends = np.array([begins[n + 1 + _below(n, parents)] for n in range(len(lengths))])
    paths = []
    for n in range(len(lengths)):
        chain = [n]
        while parents[chain[0]] >= 0:
            chain.insert(0, parents[chain[0]])
        paths.append(np.concatenate([np.arange(begins[m], begins[m + 1]) for m in chain]))
    return np.repeat(ends, lengths).astype(np.int32), paths


def _below(n: int, parents: tuple[int, ...]) -> int:
    """Return the number of nodes below n."""
    children = [m for m, parent in enumerate(parents) if parent == n]
    return sum(1 + _below(m, parents) for m in children)


LENGTHS, PARENTS = (18, 3, 1, 40, 2, 9, 5), (-1, 0, 1, 0, 3, 3, -1)
HEADS, KV_HEADS, DIM = 4, 2, 16
ON_GPU = torch.cuda.is_available()


def set_chunk(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let chunks have ``size`` keys, so that an interpreted kernel has fewer to read."""
    own = [
        *(import_module(f"rolltree.kernels.tree_decode.{name}") for name in ("items", "path_chunks", "invariant")),
        *(import_module(f"rolltree.kernels.tree_attention.{name}") for name in ("path_blocks", "triton_paths")),
    ]
    for module in own:  # all are imported by now
        patch.setattr(module, "CHUNK", size)


def operands(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    made = (torch.randn(rows, heads, DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(t.to(device_of("invariant"), dtype) for t in made)  # type: ignore[return-value]


def sampled(rows: list[Ints], cuts: list[int], q: Tensor, k: Tensor, v: Tensor, seed: int, **options: Any) -> Tensor:
    """Return decode attention of the last tokens of paths, each cut into nodes, in pages of random order."""
    rng, page = np.random.default_rng(seed), 16
    free = rng.permutation(300).tolist()
    pages = torch.full((2, 300, page, KV_HEADS, DIM), 3.0, dtype=k.dtype, device=k.device)
    plan: list[list[int]] = [[0], [], [], [], [], [], [], []]
    for r, path in enumerate(rows):
        bounds = [*(c for c in (0, *cuts) if c < len(path)), len(path)]
        for begin, end in itertools.pairwise(bounds):
            offset = int(rng.integers(page))
            own = [free.pop() for _ in range(-(-(offset + end - begin) // page))]
            for t in range(begin, end):
                at = offset + t - begin
                pages[0, own[at // page], at % page] = k[path[t]]
                pages[1, own[at // page], at % page] = v[path[t]]
            plan[1] += own
            for column, value in zip(
                (plan[0], *plan[2:7]), (len(plan[1]), offset, end - begin, begin, r, r + 1), strict=True
            ):
                column.append(value)
        plan[7].append(len(path) - 1)
    made = DecodePlan.from_host(columns(*plan), q.device, [HEADS // KV_HEADS], by_path=seed % 2 == 0)
    last = torch.from_numpy(np.array([path[-1] for path in rows])).to(q.device)
    return tree_decode_attention(q[last], *pages, made, **options)[0]


@needs_triton
@pytest.mark.check
@pytest.mark.parametrize("size", [64, pytest.param(CHUNK, marks=[] if ON_GPU else pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "options"),
    thinned(
        itertools.product([torch.float32, torch.bfloat16], [{}, {"window": 37}, {"softcap": 2.0, "scale": -0.3}]),
        lambda number, case: ON_GPU or number == 4,
    ),
    ids=str,
)
def test_a_token_has_the_same_bits_wherever_it_is_computed(
    dtype: torch.dtype, options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tree, as a sequence alone, as a piece after a prefix, and sampled from any nodes and pages."""
    set_chunk(monkeypatch, size)
    ends, paths = random_tree((size + LENGTHS[0], *LENGTHS[1:]), PARENTS)
    q, k, v = operands(dtype, len(ends))

    def trained(tokens: Ints, own: Ints, skipped: int = 0) -> Tensor:
        depth = torch.from_numpy(np.arange(len(tokens), dtype=np.int32)).to(q.device)
        at = torch.from_numpy(tokens).to(q.device)
        prefix = (k[at[:skipped]], v[at[:skipped]]) if skipped else None
        place = {"position": depth} if "window" in options else {}
        rest, own = at[skipped:], torch.from_numpy(own.astype(np.int32)).to(q.device)
        return tree_attention(q[rest], k[rest], v[rest], own, prefix_kv=prefix, **place, **options)

    position = np.zeros(len(ends), np.int32)
    for path in paths:
        position[path] = np.arange(len(path))
    where = {"position": torch.from_numpy(position).to(q.device)} if "window" in options else {}
    with use_backend("invariant"):
        whole = tree_attention(q, k, v, torch.from_numpy(ends).to(q.device), **where, **options)
        for path in (paths[2], paths[5], paths[6]):
            last = np.full(len(path), len(path))
            at = torch.from_numpy(path).to(q.device)
            assert torch.equal(trained(path, last), whole[at])
            cut = min(size + 5, len(path) - 2)
            assert torch.equal(trained(path, last, cut), whole[at[cut:]])
        ones = [paths[2], paths[4], paths[5], paths[6]]
        at = torch.from_numpy(np.array([path[-1] for path in ones])).to(q.device)
        for seed, cuts in enumerate(([], [1, 2, 30], [size, size + 3], [size - 1, size + 1, size + 18])):
            assert torch.equal(sampled(ones, cuts, q, k, v, seed, **options), whole[at])
            assert torch.equal(sampled(ones[1:2], cuts, q, k, v, seed, **options), whole[at[1:2]])
    with use_backend("reference"):
        end = torch.from_numpy(ends).to(q.device)
        exact = tree_attention(q.double(), k.double(), v.double(), end, **where, **options)
        plain = tree_attention(q, k, v, end, **where, **options)
    error, theirs = ((t.double() - exact).abs().max() for t in (whole, plain))
    assert error <= 2 * theirs + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [None, 1, 40, 700])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_have_every_key_of_a_path(seed: int, window: int | None) -> None:
    """Of pieces and trees, and of tokens whose subtree has ended before them, which see their ancestors alone."""
    ends, _, parents = random_trees((1300, 1, 90, 700)[seed], seed, close=(0.0, 0.5, 0.5, 0.02)[seed], restart=0.003)
    ended = np.random.default_rng(seed).random(len(ends)) < (0.0, 0.0, 0.2, 0.01)[seed]
    leaf = np.append(~(np.array(parents[1:], int) == np.arange(len(ends) - 1)), True)
    ends = np.where(ended & leaf, np.arange(len(ends)), ends.numpy())
    before, size = len(ends) // 3, 16
    keys, chunks, blocks = path_blocks(ends.astype(np.int64), len(ends) - before, size, window)
    assert (np.diff(blocks[:, 5]) <= 0).all()  # the longest first
    seen = set()
    for first, count, position, number, chunk, many in blocks.tolist():
        assert 0 < count <= size
        for row in range(first, first + count):
            assert row not in seen
            seen.add(row)
            token, place = before + row, position + row - first
            path = [token] if ends[token] > token else []
            above = parents[token]
            while above >= 0:
                path.insert(0, above)
                above = parents[above]
            assert place == len(path) - 1
            found = [int(key) for begin, n in chunks[chunk : chunk + many].tolist() for key in keys[begin : begin + n]]
            visible = path[CHUNK * number :]
            assert found[: len(visible)] == visible  # a chunk may have later keys, which are not visible
            assert CHUNK * number <= (0 if window is None else max(0, len(path) - window))
    assert seen == set(range(len(ends) - before))


@needs_triton
@pytest.mark.parametrize("dim", [256, pytest.param(384, marks=pytest.mark.check)])
def test_wide_heads_are_computed_in_parts(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of values in several programs have the bits of all in one."""
    from rolltree.kernels.tree_attention import triton_paths

    ends, _ = random_tree((40, 3, 9), (-1, 0, 0))
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(ends), heads, dim, generator=random).to(device_of("invariant")) for heads in (2, 1, 1))
    end = torch.from_numpy(ends).to(q.device)
    with use_backend("invariant"):
        parts = tree_attention(q, k, v, end)
        if machine.interpreting():  # a GPU has no registers for all columns
            monkeypatch.setattr(triton_paths, "VALUES", 512)
            assert torch.equal(tree_attention(q, k, v, end), parts)
    with use_backend("reference"):
        torch.testing.assert_close(parts, tree_attention(q, k, v, end), rtol=1e-5, atol=1e-5)


@needs_triton
def test_gradients_are_those_of_triton() -> None:
    ends, _ = random_tree((9, 3, 5), (-1, 0, 0))
    leaves = [t.requires_grad_() for t in operands(torch.float32, len(ends))]
    end = torch.from_numpy(ends).to(leaves[0].device)
    grads = []
    for backend in ("invariant", "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            grads.append(torch.autograd.grad(tree_attention(*leaves, end).square().sum(), leaves))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_triton
def test_positions_that_are_no_depths_are_refused() -> None:
    ends, _ = random_tree((9, 3, 5), (-1, 0, 0))
    q, k, v = operands(torch.float32, len(ends))
    end, place = (torch.from_numpy(x).to(q.device) for x in (ends, np.arange(len(ends), dtype=np.int32)))
    with use_backend("invariant"):
        for options in ({"window": 4}, {"chunk": 4}):
            with pytest.raises(ValueError, match="takes windows in depths along a path, and position has other"):
                tree_attention(q, k, v, end, position=place, **options)


def test_a_backend_of_the_process_yields_to_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread; ops that lack it run as usual."""
    monkeypatch.setattr(dispatch, "_unusable", lambda name, device: None)
    monkeypatch.delenv("ROLLTREE_BACKEND", raising=False)
    host = torch.device("cpu")
    tables = ({"invariant": 1, "cpu": 2, "triton": 3}, {"cpu": 2, "triton": 3})

    def chosen() -> list[Any]:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(dispatch.choose("op", t, host) for t in tables))  # type: ignore[type-var]
        thread.start()
        thread.join()
        return [*found, dispatch.named("invariant", host), dispatch.usable("invariant", host)]

    assert chosen() == [2, 2, False, True]
    dispatch.set_backend("invariant")
    try:
        assert chosen() == [1, 2, True, True]
        with use_backend("triton"):
            assert [dispatch.choose("op", t, host) for t in tables] == [3, 3]  # type: ignore[type-var]
            assert not dispatch.named("invariant", host)
        monkeypatch.setenv("ROLLTREE_BACKEND", "triton")
        assert chosen() == [3, 3, False, False]
    finally:
        dispatch.set_backend(None)
    with pytest.raises(ValueError, match="set_backend names 'fast', which is not a backend"):
        dispatch.set_backend("fast")  # type: ignore[arg-type]
