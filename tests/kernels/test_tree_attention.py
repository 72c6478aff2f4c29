"""tree_attention: every backend against float64, the definition against SDPA, autograd, compile, checkpointing."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rolltree.kernels import dispatch
from rolltree.kernels.libraries import load_library
from rolltree.kernels.tree_attention import tree_attention
from rolltree.kernels.tree_attention.blocks import LARGEST, tiles_for
from rolltree.kernels.tree_attention.op import tree_attention_backward_op, tree_attention_op

from ..support.trees import ancestors_mask, random_trees
from .on_device import device_of, interpret_some, needs_triton

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


@pytest.mark.slow(but=2)
@pytest.mark.check(but=18)
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


@pytest.mark.check
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


@pytest.mark.slow(but=1)
@pytest.mark.check
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


@pytest.mark.slow(but=1)
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


@pytest.mark.parametrize(("backend", "case", "cuts"), interpret_some(BACKENDS, PIECES, [1, 9, 14]))
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
