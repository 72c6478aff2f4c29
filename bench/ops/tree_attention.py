"""``tree_attention`` on trees of rollouts, against masked, block-sparse and unshared attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rolltree.engine import TokenTree
from rolltree.engine.model import varlen
from rolltree.kernels import dispatch, tree_attention

from .. import workloads
from ..runner import Bench, Calls, Case, UnsupportedError

FLAT = "sdpa, flat"
LARGEST_MASK = 20480  # tokens
MAX_FLAT = 65536  # tokens of paths that flat providers compute together


@dataclass(frozen=True)
class Inputs:
    """The attention inputs of one tree of T tokens."""

    q: Tensor  # [T, Hq, D], requires grad
    k: Tensor  # [T, Hkv, D], requires grad
    v: Tensor  # [T, Hkv, D], requires grad
    upstream: Tensor  # [T, Hq, D]
    subtree_end: Tensor  # [T] int32
    tree: TokenTree

    def paths(self) -> Iterator[Tensor]:
        """Yield rows of the leaves' paths, [B, S] at a time: paths of one length, so that nothing is padded."""
        for leaves in workloads.by_shape(self.tree, MAX_FLAT):
            rows = np.stack([self.tree.path_rows(leaf) for leaf in leaves])
            yield torch.from_numpy(rows).to(self.q.device)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    group, segments, agent = workloads.group, workloads.segments, workloads.agent
    if device.type == "cpu":
        trees, heads, dtype = {"256+4x64": group(256, 64, 4)}, (8, 4, 32), torch.float32
        if not quick:
            trees |= {
                "512+8x128": group(512, 128, 8),
                "256+segments of 64, 7 deep, 16 wide": segments(256, 64, 7, 16),
                "256+4 conversations of 6x(32+64)": agent(256, 32, 64, 6, 4),
                "32+4x512": group(32, 512, 4),
            }
    elif quick:
        trees, heads, dtype = {"512+8x128": group(512, 128, 8)}, (16, 8, 128), torch.bfloat16
    else:
        trees, heads, dtype = (
            {
                "4096+28x1024": group(4096, 1024, 28),
                "16384+16x1024": group(16384, 1024, 16),
                "2048+segments of 512, 7 deep, 16 wide": segments(2048, 512, 7, 16),
                "4096+3 conversations of 8x(512+1024)": agent(4096, 512, 1024, 8, 3),
                "1024+4x8192": group(1024, 8192, 4),
            },
            (32, 8, 128),
            torch.bfloat16,
        )
    for name, tree in trees.items():
        yield _case(name, tree, heads, dtype, device)


def shaped(
    device: torch.device,
    *,
    P: int,
    G: int,
    R: int,
    Hq: int,
    Hkv: int,
    D: int,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Case]:
    """Yield the case of ``G`` responses of ``R`` tokens to a prompt of ``P``."""
    yield _case(f"{P}+{G}x{R}", workloads.group(P, R, G), (Hq, Hkv, D), dtype, device)


def _case(name: str, tree: TokenTree, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Case:
    shape = f"heads {heads[0]}/{heads[1]} D={heads[2]} {str(dtype).removeprefix('torch.')}"
    return Case(f"{name} {shape}", partial(_inputs, tree, heads, dtype, device))


def _inputs(tree: TokenTree, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
    query_heads, kv_heads, dim = heads
    generator = torch.Generator(device).manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(tree.num_tokens, count, dim, generator=generator, device=device).to(dtype)

    q, k, v = (normal(count).requires_grad_() for count in (query_heads, kv_heads, kv_heads))
    return Inputs(q, k, v, normal(query_heads), torch.from_numpy(tree.subtree_end).to(device), tree)


def both_directions(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...], upstream: Tensor) -> Calls:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(attend(), leaves, upstream)}


def rolltree(x: Inputs) -> Calls:
    return both_directions(lambda: tree_attention(x.q, x.k, x.v, x.subtree_end), (x.q, x.k, x.v), x.upstream)


def flash(x: Inputs) -> Calls:
    """Time flash-attn 4's kernels with the tree's mask, which run only if they are asked for."""
    if not dispatch.usable("flash", x.q.device):
        raise UnsupportedError("flash-attn 4 does not run here")

    def on_flash(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with dispatch.use_backend("flash"):
                return call()

        return run

    return {direction: on_flash(call) for direction, call in rolltree(x).items()}


def sdpa_masked(x: Inputs) -> Calls:
    total = len(x.q)
    if total > LARGEST_MASK:
        raise UnsupportedError(f"its mask would take {total * total / 2**30:.1f} GiB")
    row = torch.arange(total, device=x.q.device)
    mask = (row <= row[:, None]) & (row[:, None] < x.subtree_end)

    def attend() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return both_directions(attend, (x.q, x.k, x.v), x.upstream)


def sdpa_flat(x: Inputs) -> Calls:
    """Time SDPA on every path separately, paths of one length in one batch."""
    whole = (x.q, x.k, x.v, x.upstream)
    parts = [[t.detach()[rows].transpose(1, 2).contiguous() for t in whole] for rows in x.paths()]

    def forward() -> None:
        with torch.no_grad():
            for q, k, v, _ in parts:
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def both() -> None:
        for *inputs, upstream in parts:
            q, k, v = (t.requires_grad_() for t in inputs)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), upstream)

    return {"forward": forward, "forward+backward": both}


def varlen_flat(x: Inputs) -> Calls:
    """Time every path separately, packed end to end: flash-attn's kernel if installed, else torch's."""
    attend = varlen.kernel()
    if attend is None:
        raise UnsupportedError("it needs CUDA, and flash-attn or torch's varlen attention")
    rows = [row for paths in x.paths() for row in paths]
    index = torch.cat(rows)
    lengths = [len(row) for row in rows]
    cu = torch.tensor([0, *np.cumsum(lengths)], device=index.device, dtype=torch.int32)
    q, k, v = (t.detach()[index].requires_grad_() for t in (x.q, x.k, x.v))
    return both_directions(lambda: attend(q, k, v, cu, max(lengths), None, None), (q, k, v), x.upstream[index])


def flex_attention(x: Inputs, backend: str | None = None) -> Calls:
    """Time FlexAttention with the tree's block mask, by the kernels that PyTorch chooses or by a named backend's."""
    if x.q.device.type == "cpu":
        raise UnsupportedError("timed on CUDA only, compiling takes longer than the benchmark")
    from torch.nn.attention import flex_attention as flex

    total, end = len(x.q), x.subtree_end

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (row < end[key])

    options: Any = None if backend is None else {"BACKEND": backend}
    mask = flex.create_block_mask(visible, None, None, total, total, device=x.q.device)
    compiled = torch.compile(flex.flex_attention)

    def attend() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (x.q, x.k, x.v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)[0].transpose(0, 1)

    return both_directions(attend, (x.q, x.k, x.v), x.upstream)


def bare_gemms(x: Inputs) -> Calls:
    """Time matrix products with the visible pairs' FLOP: two forward, five more backward. On a GPU they are one square
    product: those of attention's shape write their scores to memory, which no kernel of attention does."""
    total, heads, dim = x.q.shape
    if x.q.device.type == "cuda":
        side = round((workloads.visible_pairs(x.tree) * heads * dim) ** (1 / 3) / 128) * 128
        square = torch.randn(side, side, device=x.q.device).to(x.q.dtype)

        def as_many(count: int) -> None:
            for _ in range(count):
                torch.mm(square, square)

        return {"forward": lambda: as_many(2), "forward+backward": lambda: as_many(7)}
    keys = max(1, round(workloads.visible_pairs(x.tree) / total))  # keys that a row attends to, on average
    q, key, value = (torch.randn(heads, n, dim, device=x.q.device).to(x.q.dtype) for n in (total, keys, keys))
    scores = torch.empty(heads, total, keys, device=x.q.device, dtype=x.q.dtype)

    def products(count: int) -> None:
        for i in range(count):
            if i % 2 == 0:
                torch.bmm(q, key.transpose(1, 2), out=scores)
            else:
                torch.bmm(scores, value)

    return {"forward": lambda: products(2), "forward+backward": lambda: products(7)}


def pair_ratio(x: Inputs) -> float:
    return workloads.flat_pairs(x.tree) / workloads.visible_pairs(x.tree)


BENCH = Bench(
    op="tree_attention",
    directions=("forward", "forward+backward"),
    cases=cases,
    shaped=shaped,
    providers={
        "rolltree": rolltree,
        "rolltree, flash": flash,
        "sdpa, masked tree": sdpa_masked,
        FLAT: sdpa_flat,
        "varlen, flat": varlen_flat,
        "flex_attention": flex_attention,
        "flex_attention, FLASH": partial(flex_attention, backend="FLASH"),
    },
    ceiling=bare_gemms,
    ceiling_is="the matrix products of the visible (row, key) pairs alone, by torch.bmm (on a GPU as square products); "
    "of speedups the pairs that flat attention computes over those",
    speedup_over=FLAT,
    speedup_ceiling=pair_ratio,
)
