"""tree_attention: every backend against float64, the definition against SDPA, autograd, compile, checkpointing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rolltree.kernels import dispatch
from rolltree.kernels.libraries import load_library
from rolltree.kernels.tree_attention import tree_attention, visible
from rolltree.kernels.tree_attention import triton as triton_backend
from rolltree.kernels.tree_attention.blocks import LARGEST, Tile, Tiles, tiles_for
from rolltree.kernels.tree_attention.op import tree_attention_backward_op, tree_attention_op
from rolltree.kernels.tree_attention.triton_tiles import wide_product

from ..gpu.test_kernels_gpu import ATTENTION
from ..support.trees import ancestors_mask, random_trees
from .on_device import device_of, interpret_some, needs_interpreter, needs_triton

needs_cpp = pytest.mark.skipif(not load_library("cpu"), reason="the C++ kernels are not built")
BACKENDS = [
    pytest.param("reference"),
    pytest.param("cpu", marks=needs_cpp),
    pytest.param("triton", marks=needs_triton),
]


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    close: float = 0.05
    restart: float = 0.01
    scale: float | None = None

    def __str__(self) -> str:
        return f"T{self.tokens}-H{self.heads}/{self.kv_heads}-D{self.dim}-w{self.window}-c{self.softcap}-x{self.close}"


CASES = [
    Case(1, 1, 1, 32),
    Case(2, 2, 1, 16),
    Case(63, 4, 2, 32),
    Case(130, 2, 2, 64, close=0.3),
    Case(257, 2, 1, 32, close=0.0, restart=0.0),
    Case(200, 4, 2, 16, close=0.9, restart=0.1),
    Case(150, 2, 1, 96, window=20),
    Case(97, 2, 2, 128, softcap=5.0),
    Case(70, 2, 1, 256, window=1, softcap=30.0),
    Case(130, 3, 1, 40, scale=0.3, window=64),
]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    subtree_end: Tensor
    position: Tensor
    parents: list[int]

    def to(self, dtype: torch.dtype) -> Inputs:
        q, k, v, grad = (x.detach().to(dtype) for x in (self.q, self.k, self.v, self.grad))
        return Inputs(*(x.requires_grad_() for x in (q, k, v)), grad, self.subtree_end, self.position, self.parents)

    def on(self, backend: str) -> Inputs:
        """The same on the device that the backend is tested on."""
        where = device_of(backend)
        if where == self.q.device:
            return self
        q, k, v = (x.detach().to(where).requires_grad_() for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, *(x.to(where) for x in (self.grad, self.subtree_end, self.position)), self.parents)


def make(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    end, depth, parents = random_trees(case.tokens, seed, close=case.close, restart=case.restart)
    shapes = [(case.tokens, h, case.dim) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    q, k, v, grad = (torch.randn(s, generator=generator) for s in shapes)
    return Inputs(q, k, v, grad, end, depth, parents).to(dtype)


def run(x: Inputs, case: Case, backend: str) -> list[Tensor]:
    """out, dq, dk, dv"""
    x = x.on(backend)
    with dispatch.use_backend(backend):
        out = tree_attention(
            x.q,
            x.k,
            x.v,
            x.subtree_end,
            scale=case.scale,
            position=x.position,
            window=case.window,
            softcap=case.softcap,
        )
        return [t.cpu() for t in (out.detach(), *torch.autograd.grad(out, (x.q, x.k, x.v), x.grad))]


def plain(x: Inputs, case: Case) -> list[Tensor]:
    """The same from the parent pointers, in plain PyTorch of the inputs' dtype."""
    seen = ancestors_mask(x.parents)
    if case.window is not None:
        seen &= x.position[:, None] - x.position[None, :] < case.window
    group = case.heads // case.kv_heads
    q, k, v = x.q.transpose(0, 1), *(t.transpose(0, 1).repeat_interleave(group, 0) for t in (x.k, x.v))
    scores = (q @ k.transpose(1, 2)) * (case.dim**-0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    out = (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (x.q, x.k, x.v), x.grad)]


def error(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Relative to what is wanted, or to the output where that cancels to about zero (dq of a row that sees one key)."""
    least = want[0].norm()
    return [((g.double() - w).norm() / torch.maximum(w.norm(), least)).item() for g, w in zip(got, want, strict=True)]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OF_EVERY_DTYPE = [(dtype, case) for dtype in DTYPES for case in CASES]  # the interpreter computes bf16 in fp32
LONG = (CASES[4], CASES[5])
INTERPRETED = [
    i
    for i, (dtype, case) in enumerate(OF_EVERY_DTYPE)
    if (dtype == torch.float32 and case not in LONG) or case == CASES[2]
]


@pytest.mark.check(but=24)
@pytest.mark.parametrize(("backend", "dtype", "case"), interpret_some(BACKENDS, OF_EVERY_DTYPE, INTERPRETED))
def test_error_is_at_most_twice_plain_pytorchs(backend: str, dtype: torch.dtype, case: Case) -> None:
    x = make(case, dtype)
    truth = plain(x.to(torch.float64), case)
    ours, theirs = error(run(x, case, backend), truth), error(plain(x, case), truth)
    for name, e, p in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert e <= 2 * p + 4 * torch.finfo(dtype).eps, f"{name}: {e:.2e}, plain PyTorch {p:.2e}"


def test_reference_gradcheck() -> None:
    for case in (Case(9, 2, 1, 4, close=0.4), Case(7, 2, 2, 3, window=3, softcap=2.0, close=0.3)):
        x = make(case, torch.float64)
        assert torch.autograd.gradcheck(
            lambda q, k, v, x=x, case=case: tree_attention(
                q, k, v, x.subtree_end, position=x.position, window=case.window, softcap=case.softcap
            ),
            (x.q, x.k, x.v),
        )


def test_single_sequence_is_causal_attention() -> None:
    case = Case(100, 4, 2, 32, close=0.0, restart=0.0)
    x = make(case)
    heads_first = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
    want = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(tree_attention(x.q, x.k, x.v, x.subtree_end), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views(backend: str) -> None:
    case = Case(75, 4, 2, 32)
    x = make(case)
    want = run(x, case, backend)
    fused = torch.cat([x.q.transpose(0, 1), x.k.transpose(0, 1), x.v.transpose(0, 1)]).detach()  # [Hq + 2 Hkv, T, D]
    q, k, v = (t.transpose(0, 1).requires_grad_() for t in fused.split([4, 2, 2]))
    padded_grad = F.pad(x.grad, (0, 3))[..., :32]
    got = run(Inputs(q, k, v, padded_grad, x.subtree_end, x.position, x.parents), case, backend)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_packed_trees_does_not_matter(backend: str) -> None:
    case = Case(60, 2, 1, 32, restart=0.0)
    trees = [make(case, seed=seed) for seed in range(3)]
    alone = [run(x, case, backend) for x in trees]
    order = [2, 0, 1]
    packed = Inputs(
        *(torch.cat([getattr(trees[i], f) for i in order]).detach() for f in ("q", "k", "v", "grad")),
        torch.cat([trees[i].subtree_end + 60 * at for at, i in enumerate(order)]).int(),
        torch.cat([trees[i].position for i in order]),
        [],
    ).to(torch.float32)
    for got, *want in zip(run(packed, case, backend), *(alone[i] for i in order), strict=True):
        torch.testing.assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_leaves_under_one_root(backend: str) -> None:
    leaves, case = 700, Case(701, 1, 1, 16)
    x = make(case)
    x.subtree_end = torch.tensor([701, *range(2, 702)], dtype=torch.int32)
    x.parents = [-1] + [0] * leaves
    x.position = torch.tensor([0] + [1] * leaves, dtype=torch.int32)
    for e in error(run(x, case, backend), plain(x.to(torch.float64), case)):
        assert e < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("logit", [1e4, 3e37])
def test_huge_logits_stay_finite(backend: str, logit: float) -> None:
    case = Case(90, 2, 1, 32, scale=1.0)
    x = make(case)
    with torch.no_grad():
        for t in (x.q, x.k):
            t.mul_(math.sqrt(logit) / 4)
    for t in run(x, case, backend):
        assert t.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_reaches_the_rows_that_see_it_and_no_others(backend: str) -> None:
    case = Case(150, 1, 1, 32)
    x = make(case)
    with torch.no_grad():
        x.k[70, 0, 3] = math.nan
    out = run(x, case, backend)[0]
    assert torch.equal(out.isnan().all(-1).squeeze(-1), ancestors_mask(x.parents)[:, 70])
    assert torch.equal(out.isnan().any(-1).squeeze(-1), ancestors_mask(x.parents)[:, 70])


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_without_a_visible_key(backend: str) -> None:
    case = Case(50, 2, 1, 32)
    x = make(case)
    x.subtree_end = torch.arange(50, dtype=torch.int32)  # ends before it starts: nobody sees anything
    with dispatch.use_backend(backend):
        moved = x.on(backend)
        out, lse = tree_attention_op(moved.q, moved.k, moved.v, moved.subtree_end, None, 1.0, None, None)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for t in run(x, case, backend):
        assert (t == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str) -> None:
    case = Case(0, 4, 2, 32)
    for t, heads in zip(run(make(case), case, backend), (4, 4, 2, 2), strict=True):
        assert t.shape == (0, heads, 32)


@needs_cpp
def test_threads_do_not_change_the_result() -> None:
    case = Case(400, 4, 2, 32)
    x, threads, results = make(case), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(run(x, case, "cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.check
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    x = make(Case(20, 2, 1, 16)).on(backend)
    with dispatch.use_backend(backend):
        args = (x.q, x.k, x.v, x.subtree_end, x.position, 0.25, 5, None)
        torch.library.opcheck(tree_attention_op, args)
        torch.library.opcheck(tree_attention_op, (x.q[8:], *args[1:]))
        out, lse = tree_attention_op(*(t.detach() if isinstance(t, Tensor) else t for t in args))
        tensors = [t.detach() for t in (x.grad, x.q, x.k, x.v)]
        torch.library.opcheck(tree_attention_backward_op, (*tensors, out, lse, x.subtree_end, None, 0.25, None, None))


def test_compile_without_graph_breaks_or_recompilation() -> None:
    compiled = torch.compile(
        lambda x: tree_attention(x.q * 2, x.k, x.v, x.subtree_end), backend="aot_eager", fullgraph=True, dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (40, 57, 33):
            x = make(Case(tokens, 4, 2, 32))
            want = torch.autograd.grad(tree_attention(x.q * 2, x.k, x.v, x.subtree_end), x.q, x.grad)[0]
            got = torch.autograd.grad(compiled(x), x.q, x.grad)[0]
            torch.testing.assert_close(got, want)


def test_activation_checkpointing() -> None:
    case = Case(60, 2, 1, 32)
    x = make(case)
    want = torch.autograd.grad(tree_attention(x.q, x.k, x.v, x.subtree_end), (x.q, x.k, x.v), x.grad)
    out = checkpoint(tree_attention, x.q, x.k, x.v, x.subtree_end, use_reentrant=False)
    for g, w in zip(torch.autograd.grad(out, (x.q, x.k, x.v), x.grad), want, strict=True):
        assert torch.equal(g, w)


def in_pieces(x: Inputs, case: Case, backend: str, cuts: list[int]) -> list[Tensor]:
    """Return what `run` does, from calls for rows between cuts, each given the earlier keys that it sees."""
    outs, x = list[Tensor](), x.on(backend)
    with dispatch.use_backend(backend):
        for a, b in itertools.pairwise([0, *cuts, case.tokens]):
            seen = (x.subtree_end[:a] > a).nonzero().flatten()  # in depth-first order only a row's ancestors reach it
            keys = torch.cat([seen, torch.arange(a, b, device=seen.device)])
            out = tree_attention(
                x.q[a:b],
                x.k[a:b],
                x.v[a:b],
                x.subtree_end[keys] - (a - len(seen)),
                scale=case.scale,
                position=x.position[keys],
                window=case.window,
                softcap=case.softcap,
                prefix_kv=(x.k[seen], x.v[seen]),
            )
            outs.append(out)
        whole = torch.cat(outs)
        return [t.cpu() for t in (whole.detach(), *torch.autograd.grad(whole, (x.q, x.k, x.v), x.grad))]


PIECES = [
    (case, cuts)
    for case in (CASES[9], CASES[3], CASES[5], CASES[6], Case(180, 4, 2, 16, close=0.02))
    for cuts in ([64, 128], [1, 2, 70, 71], [case.tokens // 2])
]


@pytest.mark.check(but=26)
@pytest.mark.parametrize(("backend", "case", "cuts"), interpret_some(BACKENDS, PIECES, [0, 4]))
def test_pieces_give_what_the_whole_gives(backend: str, case: Case, cuts: list[int]) -> None:
    x = make(case, seed=1)
    for e in error(in_pieces(x, case, backend, cuts), plain(x.to(torch.float64), case)):
        assert e < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_piece_without_rows_gives_its_prefix_no_gradient(backend: str) -> None:
    x = make(Case(20, 2, 1, 16)).on(backend)
    with dispatch.use_backend(backend):
        out = tree_attention(x.q[:0], x.k[:0], x.v[:0], x.subtree_end, prefix_kv=(x.k, x.v))
        dk, dv = torch.autograd.grad(out, (x.k, x.v), out)
    assert out.shape == (0, 2, 16)
    assert not dk.any()
    assert not dv.any()


@pytest.mark.check(but=1)
@needs_interpreter
@pytest.mark.parametrize("case", [CASES[3], CASES[5], CASES[9]], ids=str)
def test_lists_hold_exactly_what_is_visible(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Wholly visible blocks from the front, every other visible block from the back, each once and in order."""
    monkeypatch.setattr(visible, "SPAN", 4)
    x, offset, tile = make(case, seed=2), 21, Tile(16, 8, 4)
    seen = ancestors_mask(x.parents)
    if case.window is not None:
        seen &= x.position[:, None] - x.position[None, :] < case.window
    row = torch.arange(offset, case.tokens + (offset - case.tokens) % 16).clamp(max=case.tokens - 1)
    seen = F.pad(seen[row], (0, -case.tokens % 8))
    pairs = seen.view(len(seen) // 16, 16, -1, 8).float().mean((1, 3))  # [row blocks, key blocks]
    for by_key in (False, True):
        lists = visible.visible_blocks(x.subtree_end, x.position, case.window, tile, offset, by_key)
        for block, share in enumerate(pairs.T if by_key else pairs):
            full, partial = (int(counts[block]) for counts in (lists.full_count, lists.partial_count))
            front, back = lists.blocks[block, :full].tolist(), lists.blocks[block].flip(0)[:partial].tolist()
            assert front == sorted(front)
            assert back == sorted(back)
            assert sorted(front + back) == share.nonzero().flatten().tolist()
            assert (share[front] == 1).all()
            if by_key:  # whose rows are read without a mask
                assert all(offset + 16 * (i + 1) <= case.tokens for i in front)
    assert sorted(visible.heavy_first(x.subtree_end, x.position, case.window, tile, offset)[1].tolist()) == list(
        range(len(pairs))
    )


@needs_interpreter
@pytest.mark.parametrize("shortest", [1, 5, 10**6])
def test_work_items_share_out_every_tile_once(monkeypatch: pytest.MonkeyPatch, shortest: int) -> None:
    monkeypatch.setattr(visible, "SHORTEST_ITEM", shortest)
    monkeypatch.setattr(visible, "WANTED_ITEMS", 40)
    x, tile, heads, group = make(Case(400, 1, 1, 16, close=0.02)), Tile(16, 8, 4), 2, 3
    lists, work = visible.work_items(x.subtree_end, None, None, tile, 0, heads, group)
    tiles = group * (lists.full_count + lists.partial_count)
    items = [item for item in work.items.tolist() if item[0] >= 0]
    lengths = [end - begin for _, begin, end, _ in items]
    assert lengths == sorted(lengths, reverse=True)
    limit = max(shortest, -(-heads * int(tiles.sum()) // 40))
    assert max(lengths) <= limit
    slots = dict.fromkeys(range(work.slots), 0)
    for block, total in enumerate(tiles.tolist()):
        mine = sorted(item[1:] for item in items if item[0] == block)
        assert [begin for begin, _, _ in mine] == [0, *(end for _, end, _ in mine[:-1])]
        assert mine[-1][1] == total
        (split,) = [s for s in work.splits.tolist() if s[0] == block] or [None]
        if split is None:
            assert [slot for _, _, slot in mine] == [-1]
        else:
            assert [slot for _, _, slot in mine] == list(range(split[1], split[1] + split[2]))
            for _, _, slot in mine:
                slots[slot] += 1
    assert max(slots.values(), default=0) <= 1
    assert bool(slots) == (shortest < 10**6)


@pytest.mark.check
@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [Case(110, 4, 2, 16, close=0.02), pytest.param(Case(90, 3, 1, 40, window=50), marks=pytest.mark.slow)],
    ids=str,
)
def test_partial_sums_of_a_cut_key_block(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """dK and dV as close to float64 as uncut, and the same bits each time."""
    monkeypatch.setattr(visible, "SHORTEST_ITEM", 2)
    x = make(case, seed=3)
    first, again = run(x, case, "triton"), run(x, case, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for e in error(first, plain(x.to(torch.float64), case)):
        assert e < 2e-6


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "shortest"),
    [pytest.param(Case(90, 4, 2, 32), 2, marks=pytest.mark.slow), (Case(60, 2, 1, 64, window=20, softcap=5.0), 64)],
    ids=str,
)
def test_programs_that_share_columns(monkeypatch: pytest.MonkeyPatch, case: Case, shortest: int) -> None:
    """The case is Hopper's dK/dV of D = 256: each part is as close to float64 as the whole."""
    tile = Tile(16, 32, 4)
    shared = Tiles(tile, tile, dataclasses.replace(tile, parts=2))
    monkeypatch.setattr(triton_backend, "tiles_for", lambda *_, **__: shared)
    monkeypatch.setattr(visible, "SHORTEST_ITEM", shortest)
    x = make(case, seed=4)
    for e in error(run(x, case, "triton"), plain(x.to(torch.float64), case)):
        assert e < 2e-6


@needs_interpreter
def test_tiles_of_a_loop_short_of_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case is Hopper's dK/dV of D = 128, whose pointers are made anew from numbers of rows; views with strides."""
    tiles = Tiles(Tile(64, 64, 4), Tile(64, 64, 4), Tile(64, 128, 4))
    monkeypatch.setattr(triton_backend, "tiles_for", lambda *_, **__: tiles)
    case = Case(200, 2, 1, 128, close=0.02)
    x = make(case, seed=5)
    expected = plain(x.to(torch.float64), case)
    fused = torch.cat([x.q.transpose(0, 1), x.k.transpose(0, 1), x.v.transpose(0, 1)]).detach()  # [Hq + 2 Hkv, T, D]
    q, k, v = (t.transpose(0, 1).requires_grad_() for t in fused.split([2, 1, 1]))
    for e in error(run(Inputs(q, k, v, x.grad, x.subtree_end, x.position, x.parents), case, "triton"), expected):
        assert e < 2e-6


@triton.jit
def _products(first, out, factor):
    at = tl.arange(0, 8)
    tl.store(out + at, wide_product(tl.load(first + at), factor + tl.zeros([], tl.int32)))


@needs_interpreter
def test_products_of_64_bits() -> None:
    first, more = torch.tensor([0, 1, 65535, 2**31 - 1, 3 * 2**29], dtype=torch.int32), 2**31 + 5
    for factor in (0, 1, 16, 4096, 2**31 - 1, more):
        out = torch.zeros(8, dtype=torch.int64)
        _products[(1,)](F.pad(first, (0, 3)), out, factor)
        assert out[: len(first)].tolist() == [int(x) * factor for x in first]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 9.0])
@pytest.mark.parametrize("scale", [0.0, -0.4])
def test_any_scale(scale: float, softcap: float | None, backend: str) -> None:
    case = Case(60, 2, 1, 32, scale=scale, softcap=softcap)
    x = make(case)
    for e in error(run(x, case, backend), plain(x.to(torch.float64), case)):
        assert e < 2e-6


def test_row_blocks_of_dkdv_lie_in_those_that_dq_writes() -> None:
    """lse and delta of the rows that fill up the last block of dK/dV are written by dQ."""
    for dim, dtype, major, softcap in itertools.product(
        (64, 128, 256), (torch.float32, torch.bfloat16), (8, 9, 10), (False, True)
    ):
        tiles = tiles_for(dim, dtype, major=major, softcap=softcap)
        assert tiles.dq.rows % tiles.dkdv.rows == 0
        assert all(LARGEST % n == 0 for t in (tiles.forward, tiles.dq, tiles.dkdv) for n in (t.rows, t.keys))


def test_lists_are_made_once_for_all_layers() -> None:
    x, tile = make(Case(90, 1, 1, 16)), Tile(16, 16, 4)
    first = visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False)
    assert visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False) is first
    x.subtree_end[0] = 1
    assert visible.visible_blocks(x.subtree_end, None, None, tile, 0, by_key=False) is not first


def test_expanded_gradient() -> None:
    x = make(Case(30, 2, 1, 32))
    tree_attention(x.q, x.k, x.v, x.subtree_end).sum().backward()
    torch.testing.assert_close(x.v.grad.sum(), torch.tensor(30.0 * 2 * 32))


def test_errors_name_the_argument() -> None:
    x = make(Case(8, 4, 2, 32))
    q, k, v, end = x.q, x.k, x.v, x.subtree_end
    for match, call in [
        ("query heads", lambda: tree_attention(q[:, :3], k, v, end)),
        ("subtree_end", lambda: tree_attention(q, k, v, end.long())),
        ("subtree_end", lambda: tree_attention(q, k, v, end[:5])),
        ("position", lambda: tree_attention(q, k, v, end, window=4)),
        ("window", lambda: tree_attention(q, k, v, end, window=0, position=x.position)),
        ("softcap", lambda: tree_attention(q, k, v, end, softcap=0.0)),
        ("not torch.float16", lambda: tree_attention(q.half(), k, v, end)),
        (r"k must be \[8, Hkv, 32\] like q", lambda: tree_attention(q, k[:5], v[:5], end)),
        (r"subtree_end must be \[16\]", lambda: tree_attention(q, k, v, end, prefix_kv=(k, v))),
        ("prefix_kv has 8 keys and 5 values", lambda: tree_attention(q, k, v, end, prefix_kv=(k, v[:5]))),
        ("prefix_kv", lambda: tree_attention(q, k, v, end, prefix_kv=(k.half(), v.half()))),
        ("last dimension", lambda: tree_attention(q.mT.contiguous().mT, k, v, end)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


def test_rows_of_gradients_are_aligned() -> None:
    """dK/dV copies rows of q and of the output's gradient by 16 bytes wherever the head dimension allows it."""
    whole = torch.randn(5, 2, 64).bfloat16()
    wide = torch.randn(5, 2, 72).bfloat16()
    assert triton_backend.aligned(whole) is whole
    assert triton_backend.aligned(wide[..., 8:]).data_ptr() == wide[..., 8:].data_ptr()
    for view in (wide[..., 1:65], torch.randn(5 * 132).bfloat16().as_strided((5, 2, 64), (132, 64, 1))):
        copy = triton_backend.aligned(view)
        assert torch.equal(copy, view)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == (128, 64, 1)
    odd = torch.randn(5, 2, 36).bfloat16()  # rows of 72 bytes begin anywhere
    assert triton_backend.aligned(odd) is odd


def test_a_gpu_checks_every_kind_of_tile() -> None:
    """`make gpu` compares attention with float64 first: its trees reach both loops of each kernel, and cut roots."""
    kinds = set()
    for tokens, (heads, kv_heads), dim, kind in ATTENTION:
        end, _, _ = random_trees(tokens, seed=1, **kind)
        tiles = tiles_for(dim, torch.bfloat16, major=9, softcap=False)
        programs = kv_heads * tiles.dkdv.parts
        of_keys, work = visible.work_items(end, None, None, tiles.dkdv, 0, programs, heads // kv_heads)
        of_rows = [visible.heavy_first(end, None, None, tile, 0)[0] for tile in (tiles.forward, tiles.dq)]
        full = [bool(blocks.full_count.any()) for blocks in (*of_rows, of_keys)]
        assert all(blocks.partial_count.any() for blocks in (*of_rows, of_keys))
        kinds.add((dim, *full, bool((work.splits[:, 0] >= 0).any())))
    assert kinds == {(128, False, False, False, False), *((dim, True, True, True, True) for dim in (64, 128, 256))}
