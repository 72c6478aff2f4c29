"""tree_decode_attention: every backend against float64 over gathered paths, batch invariance, bad input."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolltree.kernels import dispatch
from rolltree.kernels.libraries import load_library
from rolltree.kernels.tree_decode import DecodePlan, tree_decode_attention
from rolltree.kernels.tree_decode import items as items_module
from rolltree.kernels.tree_decode import schedule as schedules
from rolltree.kernels.tree_decode.api import tree_decode_op
from rolltree.kernels.tree_decode.items import CHUNK, QUERIES
from rolltree.kernels.tree_decode.plan import host_columns, lay_out

from .on_device import device_of, interpret_some, needs_interpreter, needs_triton

needs_cpp = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=needs_cpp),
    pytest.param("triton", marks=needs_triton),
    pytest.param("invariant", marks=needs_triton),
]
INTERPRETED = ("triton", "invariant")


@dataclass
class Node:
    parent: int
    length: int
    offset: int
    pages: list[int]
    position: int = 0
    rows: tuple[int, int] = (0, 0)


@dataclass
class Step:
    """One decode step of a random forest: its plan, and each row's keys as (page, slot) in path order."""

    plan: DecodePlan
    keys: list[list[tuple[int, int]]]
    pages: int
    page: int


def forest(seed: int, *, roots: int = 3, page: int = 4, longest: int = 90, chunk: int = 1) -> Step:
    """Random trees; every leaf is a sequence whose last ``chunk`` tokens (at most) are the query rows."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    free = list(range(2000))
    rng.shuffle(free)
    paths: list[list[int]] = []  # node ids of every leaf, depth first

    def grow(parent: int, path: list[int], depth: int) -> None:
        length, offset = rng.randint(1, longest), rng.randrange(page)
        count = (offset + length + page - 1) // page
        position = nodes[parent].position + nodes[parent].length if path else 0
        nodes.append(Node(parent, length, offset, [free.pop() for _ in range(count)], position))
        path = [*path, len(nodes) - 1]
        if depth == 0 or rng.random() < 0.2:
            paths.append(path)
        else:
            for _ in range(rng.randint(1, 4)):
                grow(path[-1], path, depth - 1)

    for _ in range(roots):
        grow(-1, [], rng.randint(0, 3))

    positions: list[int] = []
    keys: list[list[tuple[int, int]]] = []
    for path in paths:
        leaf = nodes[path[-1]]
        queries = min(chunk, leaf.length)
        first = len(positions)
        slots = [divmod(nodes[n].offset + x, page) for n in path for x in range(nodes[n].length)]
        owner = [n for n in path for _ in range(nodes[n].length)]
        whole = [(nodes[n].pages[p], s) for n, (p, s) in zip(owner, slots, strict=True)]
        for q in range(queries):
            positions.append(leaf.position + leaf.length - queries + q)
            keys.append(whole[: positions[-1] + 1])
        for n in path:
            begin = nodes[n].rows[0] if nodes[n].rows[1] else first
            nodes[n].rows = (begin, len(positions))

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    indptr = [0]
    for node in nodes:
        indptr.append(indptr[-1] + len(node.pages))
    plan = DecodePlan(
        page_indptr=int32(indptr),
        page_ids=int32([p for node in nodes for p in node.pages]),
        node_offset=int32([n.offset for n in nodes]),
        node_length=int32([n.length for n in nodes]),
        node_position=int32([n.position for n in nodes]),
        row_begin=int32([n.rows[0] for n in nodes]),
        row_end=int32([n.rows[1] for n in nodes]),
        query_position=int32(positions),
    )
    return Step(plan, keys, 2000, page)


def tensors(
    step: Step, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(step.keys), heads, dim, generator=generator)
    k, v = torch.randn(2, step.pages, step.page, kv_heads, dim, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by_paths(
    q: Tensor, k: Tensor, v: Tensor, step: Step, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Each row over its own gathered path, in the dtype of q; rows that see as many keys at once."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    alike: dict[int, list[int]] = {}
    for row, slots in enumerate(step.keys):
        alike.setdefault(min(len(slots), window or len(slots)), []).append(row)
    for count, rows in alike.items():
        for some in (rows[i : i + 64] for i in range(0, len(rows), 64)):
            page, slot = torch.tensor([step.keys[row][-count:] for row in some]).unbind(-1)  # [R, X]
            keys, values = (t[page, slot].repeat_interleave(q.shape[1] // t.shape[2], 2) for t in (k, v))
            scores = torch.einsum("rhd,rxhd->rhx", q[some], keys) * q.shape[2] ** -0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[some] = torch.einsum("rhx,rxhd->rhd", scores.softmax(-1), values)
            lse[some] = scores.to(lse.dtype).logsumexp(-1)
    return out, lse


def run(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DecodePlan,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run on the backend's device; return results on the CPU."""
    where = device_of(backend)
    if where != q.device:
        q, k, v = (x.to(where) for x in (q, k, v))
        plan = replace(plan, **{name: x.to(where) for name, x in plan.tensors().items()})
    with dispatch.use_backend(backend):
        out, lse = tree_decode_attention(q, k, v, plan, window=window, softcap=softcap)
    return out.cpu(), lse.cpu()


SHAPES = [(4, 2, 32, 1, None, None), (8, 1, 64, 1, 30, None), (2, 2, 40, 9, None, 4.0), (6, 2, 128, 30, 17, None)]
OF_EVERY_DTYPE = [(dtype, *s) for dtype in (torch.float32, torch.bfloat16, torch.float16) for s in SHAPES]


@pytest.mark.slow(but=1)
@pytest.mark.check(but=5)
@pytest.mark.parametrize(
    ("backend", "dtype", "heads", "kv_heads", "dim", "chunk", "window", "softcap"),
    interpret_some(BACKENDS, OF_EVERY_DTYPE, [0, 1, 2, 3, 5, 10]),
)
def test_error_is_at_most_twice_plain_pytorchs(
    backend: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    chunk: int,
    window: int | None,
    softcap: float | None,
) -> None:
    step = forest(seed=heads, chunk=chunk, longest=40 if backend in INTERPRETED else 90)
    q, k, v = tensors(step, heads, kv_heads, dim, dtype)
    truth = by_paths(q.double(), k.double(), v.double(), step, window, softcap)
    theirs = by_paths(q, k, v, step, window, softcap)
    ours = run(backend, q, k, v, step.plan, window, softcap)
    assert ours[0].dtype == dtype
    for got, plain, want in zip(ours, theirs, truth, strict=True):
        error, bound = ((x.double() - want).norm() / want.norm() for x in (got, plain))
        assert error <= 2 * bound + 2 * torch.finfo(dtype).eps


@pytest.mark.check(but=1)
@needs_interpreter
@pytest.mark.parametrize(("heads", "kv_heads", "chunk", "window"), [(4, 2, 1, None), (3, 1, 20, 40), (16, 1, 3, None)])
def test_nodes_of_many_chunks_and_tiles(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, chunk: int, window: int | None
) -> None:
    """Many partials a row, more rows below a node than an item takes, fewer programs than items."""
    monkeypatch.setattr(schedules, "CHUNK", 32)
    monkeypatch.setattr(schedules, "PROGRAMS_A_PROCESSOR", 3)
    monkeypatch.setattr(items_module, "QUERIES", 16)
    step = forest(seed=48, roots=1, chunk=chunk, longest=100)
    q, k, v = tensors(step, heads, kv_heads, 16)
    nodes = schedules.Nodes(*step.plan.tensors().values())
    partial_begin, items, *_ = schedules.make_schedule(nodes, heads // kv_heads)
    assert partial_begin.diff().max() > 5
    assert items[0, 0] > 2 * len(step.plan.node_length)
    assert (items[1:, 2].diff() <= 0).all(), "the longest come first"
    want = by_paths(q.double(), k.double(), v.double(), step, window)
    for got, w in zip(run("triton", q, k, v, step.plan, window), want, strict=True):
        torch.testing.assert_close(got.double(), w, rtol=1e-5, atol=2e-6)


@needs_interpreter
def test_more_query_heads_than_an_item_has_queries() -> None:
    step = forest(seed=12, roots=1)
    q, k, v = tensors(step, 71, 1, 16)
    for got, want in zip(
        run("triton", q, k, v, step.plan), by_paths(q.double(), k.double(), v.double(), step), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


def on_host(plan: DecodePlan) -> list[np.ndarray]:
    return [x.numpy() for x in plan.tensors().values()]


@pytest.mark.parametrize("group", [1, 3, 8])
def test_items_cover_every_row_and_key_once(group: int) -> None:
    """Each (row, key of its path) is in one item; partials of a row are numbered along its path, without gaps."""
    step = forest(seed=13, roots=2, chunk=9, longest=1300, page=16)
    plan = on_host(step.plan)
    indptr, _, offset, length, position, row_begin, row_end, query_position = plan
    begin, items, partials, *_ = schedules.make_schedule(schedules.Nodes(*step.plan.tensors().values()), group)
    assert int(begin[-1]) == partials == schedules.count_partials(length, row_begin, row_end)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for first_page, slot, keys, first, row, rows, before, _ in items[1:].tolist():
        assert 0 < keys <= CHUNK
        assert 0 < rows * group <= QUERIES
        for r in range(row, row + rows):
            assert (r, before) not in found
            found[r, before] = (first_page, slot, keys, first)
    for r in range(len(query_position)):
        expected = [
            (indptr[n], offset[n] + c, min(length[n] - c, CHUNK), position[n] + c)
            for n in range(len(length))
            if row_begin[n] <= r < row_end[n]
            for c in range(0, length[n], CHUNK)
        ]
        assert [found.pop((r, i)) for i in range(int(begin[r + 1] - begin[r]))] == expected
    assert not found


def test_nodes_out_of_order_are_refused() -> None:
    """Partials could not be numbered by node."""
    step = forest(seed=14, roots=2)
    lengths, begins, ends = (on_host(step.plan)[i] for i in (3, 5, 6))
    schedules.partials_of_rows(lengths, begins, ends, len(step.keys))
    with pytest.raises(ValueError, match="depth-first"):
        schedules.partials_of_rows(lengths, begins[::-1], ends[::-1], len(step.keys))
    one = np.ones(3, np.int32)
    with pytest.raises(ValueError, match="among those of its parent"):
        schedules.partials_of_rows(one, np.array([0, 0, 2]), np.array([4, 3, 4]), 4)


@pytest.mark.slow
@needs_interpreter
def test_schedules_made_beforehand_and_with_room_change_nothing() -> None:
    """A step's plan and schedule come in one vector, padded as graphs pad it: the same bits, with nothing made anew."""
    step = forest(seed=7)
    q, k, v = tensors(step, 4, 2, 32)
    want = run("triton", q, k, v, step.plan)
    arrays = on_host(step.plan)
    exact = DecodePlan.from_host(arrays, torch.device("cpu"), [1, 2])
    assert exact.schedule is not None
    columns = host_columns(arrays, [2])
    rows, nodes = len(step.keys), len(arrays[3])
    sizes = {name: len(column) + 40 for name, column in columns.items()}
    sizes |= {"query_position": rows, "partial_begin": rows + 1}
    sizes |= dict.fromkeys(("node_offset", "node_length", "node_position", "row_begin", "row_end"), nodes + 5)
    sizes |= {"page_indptr": nodes + 6}
    places, length = lay_out(sizes)
    vector = torch.zeros(length, dtype=torch.int32)
    for name, column in columns.items():
        vector[places[name]][: len(column)] = torch.from_numpy(column)
        if name == "page_indptr":
            vector[places[name]][len(column) :] = int(column[-1])  # nodes without pages
        assert places[name].start * 4 % 128 == 0
    padded = DecodePlan.of_columns({n: vector[p] for n, p in places.items()}, exact.schedule.partials + 50)
    for plan in (exact, padded):
        schedules._schedules.clear()
        got = run("triton", q, k, v, plan)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert len(schedules._schedules) == 0
    bare = DecodePlan.from_host(arrays, torch.device("cpu"))
    assert bare.schedule is None


@needs_interpreter
def test_a_scheduled_call_only_makes_room_and_launches() -> None:
    """No sort, no search, no copy beside the two kernels: what every layer of a replayed step would repeat."""

    class Called(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.add(str(func))
            return func(*args, **(kwargs or {}))

    step = forest(seed=15, roots=1)
    q, k, v = tensors(step, 4, 2, 16)
    plan = DecodePlan.from_host(on_host(step.plan), torch.device("cpu"), [2])
    with Called() as called:
        run("triton", q, k, v, plan)
    room, interpreter = ("new_empty", "empty"), ("copy_", "set_")  # which brings tensors to the host and back
    assert {op.split(".")[1] for op in called.ops} <= {*room, *interpreter}


@needs_interpreter
def test_keys_and_values_of_other_strides_are_refused() -> None:
    step = forest(seed=5)
    q, k, v = tensors(step, 4, 2, 32)
    with pytest.raises(ValueError, match="same strides"):
        run("triton", q, k, v.transpose(1, 2).contiguous().transpose(1, 2), step.plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_may_be_views(backend: str) -> None:
    step = forest(seed=5)
    q, k, v = tensors(step, 4, 2, 32)
    want = run(backend, q, k, v, step.plan)
    fused = torch.stack([k, v], dim=2)  # [P, page, 2, Hkv, D]
    got = run(backend, q.transpose(0, 1).contiguous().transpose(0, 1), fused[:, :, 0], fused[:, :, 1], step.plan)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def restrict(plan: DecodePlan, begin: int, end: int) -> DecodePlan:
    """The plan of rows [begin, end) alone."""
    kept = [n for n in range(plan.node_length.numel()) if plan.row_begin[n] < end and plan.row_end[n] > begin]
    lists = [plan.page_ids[plan.page_indptr[n] : plan.page_indptr[n + 1]] for n in kept]
    return DecodePlan(
        page_indptr=torch.tensor([0, *torch.tensor([len(x) for x in lists]).cumsum(0)], dtype=torch.int32),
        page_ids=torch.cat(lists),
        node_offset=plan.node_offset[kept],
        node_length=plan.node_length[kept],
        node_position=plan.node_position[kept],
        row_begin=(plan.row_begin[kept] - begin).clamp_min(0),
        row_end=plan.row_end[kept].clamp_max(end) - begin,
        query_position=plan.query_position[begin:end].contiguous(),
    )


HEADS_AND_CHUNKS = [(4, 2, 32, 1), (3, 3, 64, 20), (3, 3, 64, 1), (4, 2, 32, 20)]


@pytest.mark.slow(but=1)
@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    ("backend", "heads", "kv_heads", "dim", "chunk"), interpret_some(BACKENDS[1:], HEADS_AND_CHUNKS, [0, 1])
)
def test_bits_of_a_row_do_not_depend_on_the_batch(
    backend: str, heads: int, kv_heads: int, dim: int, chunk: int
) -> None:
    few = backend in INTERPRETED  # the interpreter takes its time
    step = forest(seed=3, roots=3 if few else 12, chunk=chunk, longest=40 if few else 90)
    q, k, v = tensors(step, heads, kv_heads, dim)
    together = run(backend, q, k, v, step.plan)
    rows = len(step.keys)
    for begin, end in [(0, 1), (rows - 1, rows), (1, 6), (rows // 3, rows // 3 + 17), (5, rows)]:
        alone = run(backend, q[begin:end], k, v, restrict(step.plan, begin, end))
        assert all(torch.equal(a, t[begin:end]) for a, t in zip(alone, together, strict=True))


@needs_cpp
def test_threads_do_not_change_the_result() -> None:
    step, threads, results = forest(seed=4, roots=9), torch.get_num_threads(), []
    inputs = tensors(step, 4, 2, 32)
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(run("cpu", *inputs, step.plan))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.slow(but=2)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_under_one_prompt(backend: str) -> None:
    rows, prompt = 100 if backend in INTERPRETED else 300, 150
    plan = DecodePlan(
        page_indptr=torch.arange(0, rows + 2).int() + torch.tensor([0] + [9] * (rows + 1)).int(),
        page_ids=torch.arange(rows + 10).int(),
        node_offset=torch.tensor([3] + [0] * rows).int(),
        node_length=torch.tensor([prompt] + [2] * rows).int(),
        node_position=torch.tensor([0] + [prompt] * rows).int(),
        row_begin=torch.tensor([0, *range(rows)]).int(),
        row_end=torch.tensor([rows, *range(1, rows + 1)]).int(),
        query_position=torch.full((rows,), prompt + 1).int(),
    )
    shared = [divmod(3 + x, 16) for x in range(prompt)]
    step = Step(plan, [[*shared, (10 + r, 0), (10 + r, 1)] for r in range(rows)], rows + 10, 16)
    q, k, v = tensors(step, 2, 1, 32)
    want = by_paths(q.double(), k.double(), v.double(), step)
    for got, w in zip(run(backend, q, k, v, plan), want, strict=True):
        torch.testing.assert_close(got.double(), w, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_visible_key(backend: str) -> None:
    step = forest(seed=6)
    q, k, v = tensors(step, 2, 2, 32)
    nothing = replace(step.plan, query_position=torch.full_like(step.plan.query_position, -1))
    out, lse = run(backend, q, k, v, nothing)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    plan = DecodePlan(torch.zeros(1, dtype=torch.int32), none, none, none, none, none, none, none)
    pages = torch.zeros(4, 16, 2, 32)
    out, lse = run(backend, torch.zeros(0, 4, 32), pages, pages, plan)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_logits_stay_finite(backend: str) -> None:
    step = forest(seed=7)
    q, k, v = tensors(step, 2, 1, 32)
    for got in run(backend, q * 1e3, k * 1e2, v, step.plan):
        assert got.isfinite().all()


@pytest.mark.check(but=1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    step = forest(seed=8, longest=9)
    given = [t.to(device_of(backend)) for t in (*tensors(step, 2, 1, 16), *step.plan.tensors().values())]
    with dispatch.use_backend(backend):
        torch.library.opcheck(tree_decode_op, (*given, None, None, 0, None, None, 0.25, 7, None))


def test_errors_name_the_argument() -> None:
    step = forest(seed=9)
    q, k, v = tensors(step, 4, 2, 32)
    for match, call in [
        ("query positions", lambda: tree_decode_attention(q[1:], k, v, step.plan)),
        ("query heads", lambda: tree_decode_attention(q[:, :3], k, v, step.plan)),
        ("k_pages must be fp16", lambda: tree_decode_attention(q.half(), k, v, step.plan)),
        ("pages", lambda: tree_decode_attention(q, k, v[1:], step.plan)),
        ("window", lambda: tree_decode_attention(q, k, v, step.plan, window=0)),
        ("softcap", lambda: tree_decode_attention(q, k, v, step.plan, softcap=-1.0)),
        ("node_offset", lambda: replace(step.plan, node_offset=step.plan.node_offset.long())),
        ("row_end", lambda: replace(step.plan, row_end=step.plan.row_end[1:])),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
