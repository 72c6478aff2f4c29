"""tree_decode_attention: every backend against float64 over gathered paths, batch invariance, bad input."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rolltree.kernels import dispatch
from rolltree.kernels.tree_decode import DecodePlan, tree_decode_attention
from rolltree.kernels.tree_decode import triton as triton_backend
from rolltree.kernels.tree_decode import work as work_list
from rolltree.kernels.tree_decode.api import tree_decode_op

needs_cpp = pytest.mark.skipif(not dispatch.load_library("cpu"), reason="the C++ kernels are not built")
needs_interpreter = pytest.mark.skipif(not dispatch.interpreting(), reason="Triton runs on the CPU in its interpreter")
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=needs_cpp),
    pytest.param("triton", marks=needs_interpreter),
]


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
        for q in range(queries):
            positions.append(leaf.position + leaf.length - queries + q)
            slots = [divmod(nodes[n].offset + x, page) for n in path for x in range(nodes[n].length)]
            owner = [n for n in path for _ in range(nodes[n].length)]
            keys.append([(nodes[n].pages[p], s) for n, (p, s) in zip(owner, slots, strict=True)][: positions[-1] + 1])
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
    """Each row over its own gathered path, in the dtype of q."""
    out, lse = [], []
    for row, slots in enumerate(step.keys):
        slots = slots if window is None else slots[-window:]
        page, slot = (torch.tensor(x) for x in zip(*slots, strict=True))
        keys, values = (t[page, slot].repeat_interleave(q.shape[1] // t.shape[2], 1) for t in (k, v))
        scores = torch.einsum("hd,xhd->hx", q[row], keys) * q.shape[2] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out.append(torch.einsum("hx,xhd->hd", scores.softmax(-1), values))
        lse.append(scores.float().logsumexp(-1) if q.dtype != torch.float64 else scores.logsumexp(-1))
    return torch.stack(out), torch.stack(lse)


def run(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DecodePlan,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    with dispatch.use_backend(backend):
        return tree_decode_attention(q, k, v, plan, window=window, softcap=softcap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "chunk", "window", "softcap"),
    [(4, 2, 32, 1, None, None), (8, 1, 64, 1, 30, None), (2, 2, 40, 9, None, 4.0), (6, 2, 128, 30, 17, None)],
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
    step = forest(seed=heads, chunk=chunk)
    q, k, v = tensors(step, heads, kv_heads, dim, dtype)
    truth = by_paths(q.double(), k.double(), v.double(), step, window, softcap)
    theirs = by_paths(q, k, v, step, window, softcap)
    ours = run(backend, q, k, v, step.plan, window, softcap)
    assert ours[0].dtype == dtype
    for got, plain, want in zip(ours, theirs, truth, strict=True):
        error, bound = ((x.double() - want).norm() / want.norm() for x in (got, plain))
        assert error <= 2 * bound + 2 * torch.finfo(dtype).eps


@needs_interpreter
@pytest.mark.parametrize(("heads", "kv_heads", "chunk", "window"), [(4, 2, 1, None), (3, 1, 20, 40), (16, 1, 3, None)])
def test_nodes_of_many_chunks_and_tiles(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, chunk: int, window: int | None
) -> None:
    """Many partials a row, more rows below a node than an item takes, fewer programs than items."""
    for name, small in {"CHUNK": 32, "QUERIES": 16, "PROGRAMS_A_PROCESSOR": 3}.items():
        for module in (triton_backend, work_list):
            monkeypatch.setattr(module, name, small, raising=False)
    step = forest(seed=11, roots=1, chunk=chunk, longest=150)
    q, k, v = tensors(step, heads, kv_heads, 16)
    work = work_list.work_of(
        step.plan.row_begin, step.plan.row_end, step.plan.node_length, len(step.keys), heads // kv_heads, None
    )
    assert work.partial_begin.diff().max() > 5
    assert work.item_end[-1] > 2 * len(step.plan.node_length)
    want = by_paths(q.double(), k.double(), v.double(), step, window)
    for got, w in zip(run("triton", q, k, v, step.plan, window), want, strict=True):
        torch.testing.assert_close(got.double(), w, rtol=1e-5, atol=2e-6)


@needs_interpreter
def test_room_for_more_partials_than_there_are_changes_nothing() -> None:
    """A bound known on the host spares a wait for the device; what is beyond the count is of no row."""
    step = forest(seed=7)
    q, k, v = tensors(step, 4, 2, 32)
    plan = step.plan
    arrays = [x.numpy() for x in plan.tensors().values()]
    exact = DecodePlan.from_host(arrays, torch.device("cpu"))
    want = run("triton", q, k, v, plan)
    for most in (exact.partials, exact.partials + 1, 3 * exact.partials + 50):  # type: ignore[operator]
        # tensors of its own: work is remembered by them
        bounded = DecodePlan(**{n: x.clone() for n, x in plan.tensors().items()}, partials=most)
        got = run("triton", q, k, v, bounded)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


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


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("chunk", [1, 20])
def test_bits_of_a_row_do_not_depend_on_the_batch(chunk: int, backend: str) -> None:
    step = forest(seed=3, roots=12, chunk=chunk)
    for heads, kv_heads, dim in ((4, 2, 32), (3, 3, 64)):
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_under_one_prompt(backend: str) -> None:
    rows, prompt = 300, 150
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    step = forest(seed=8, longest=9)
    q, k, v = tensors(step, 2, 1, 16)
    with dispatch.use_backend(backend):
        torch.library.opcheck(tree_decode_op, (q, k, v, *step.plan.tensors().values(), 0.25, 7, None, None))


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
