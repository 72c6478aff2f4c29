"""Triton backend: a layer in ten kernels, for steps of few rows that are replayed as a CUDA graph.

    add_norm     residual + x, written, and its norm: 8 bytes a number of bf16
    several      q, k and v in one launch over three weights (kernels/linear/several.py)
    store        the heads of a row: norms, rotation, and keys and values written to their slots
    partial, merge    attention over the pages (kernels/tree_decode)
    product      with o, by the library
    add_norm, several (gate and up), gate, product (down)

Between two kernels the rows stay in the cache; a step pays for the number of its kernels. Numbers are rounded where
`kernels/layer_ops` and Transformers' modules round them, and nothing is contracted, so the passes have the bits of
those kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..layer_ops.triton import BLOCK, tile_of
from ..linear.several import several
from ..low_rank import add_low_rank_
from ..tree_decode.schedule import Nodes, Work
from ..tree_decode.triton import tree_decode
from .weights import PRODUCTS, Adapted, DecoderParts, LayerWeights

HEADS = 16  # of a tile that is turned at once


@triton.jit(do_not_specialize=["N"])
def add_norm_kernel(
    residual,  # [N, H], changed in place
    x,  # [N, H], or None; with PARTS [PARTS, N, H] fp32
    weight,  # [H]
    out,  # [N, H]
    N,
    H,
    eps,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = row[:, None] * H + column[None, :], (row < N)[:, None] & (column < H)[None, :]
    total = tl.load(residual + at, mask=inside, other=0.0)
    if x is not None:
        added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if PARTS > 0:  # of a product, which is rounded when they have been added
            for part in tl.static_range(1, PARTS):
                added += tl.load(x + part * N.to(tl.int64) * H + at, mask=inside, other=0.0)
            added = added.to(total.dtype).to(tl.float32)
        total = (total.to(tl.float32) + added).to(total.dtype)
        tl.store(residual + at, total, mask=inside)
    wide = total.to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / H + eps)
    normed = (wide * r[:, None]).to(total.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + at, (scale[None, :] * normed).to(total.dtype), mask=inside)


@triton.jit
def _turned(x, weight, cos, sin, head, HEADS, eps, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return heads of a row [heads, WIDTH], normed by ``weight`` if it is given, and rotated."""
    column = tl.arange(0, WIDTH)
    other = tl.where(column < DIM // 2, column + DIM // 2, column - DIM // 2)  # the same place in the other half
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    here = tl.load(x + head[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    there = tl.load(x + head[:, None] * DIM + other[None, :], mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = here.dtype
    here = here.to(tl.float32)
    if weight is not None:
        r = (1.0 / tl.sqrt_rn(tl.sum(here * here, 1) / DIM + eps))[:, None]
        scale = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        scale_there = tl.load(weight + other, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        here = (scale * (here * r).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        there = (scale_there * (there * r).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    along = (here * cos[None, :]).to(dtype).to(tl.float32)
    across = (there * sin[None, :]).to(dtype).to(tl.float32)
    return tl.where((column < DIM // 2)[None, :], along - across, along + across).to(dtype)


@triton.jit
def store_kernel(
    q,  # [N, Hq, D], rows q_row apart, changed in place
    k,  # [N, Hkv, D], rows k_row apart
    v,  # [N, Hkv, D], rows v_row apart
    q_weight,  # [D], or None, as k_weight
    k_weight,
    cos,  # [T, D]
    sin,  # [T, D]
    turns,  # [N], or None for one a row
    slots,  # [N]
    k_pages,  # [slots, Hkv, D]
    v_pages,
    q_row, k_row, v_row, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    turn = row
    if turns is not None:
        turn = tl.load(turns + row).to(tl.int64)
    of_row = tl.load(cos + turn * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
    sine = tl.load(sin + turn * DIM + column, mask=column < DIM, other=0.0).to(tl.float32)
    for begin in tl.static_range(0, Q_HEADS, Q_TILE):
        head = begin + tl.arange(0, Q_TILE)
        turned = _turned(q + row * q_row, q_weight, of_row, sine, head, Q_HEADS, eps, DIM, WIDTH)
        inside = (head < Q_HEADS)[:, None] & (column < DIM)[None, :]
        tl.debug_barrier()  # all threads have read both halves
        tl.store(q + row * q_row + head[:, None] * DIM + column[None, :], turned, mask=inside)
    to = tl.load(slots + row).to(tl.int64) * K_HEADS * DIM
    for begin in tl.static_range(0, K_HEADS, K_TILE):
        head = begin + tl.arange(0, K_TILE)
        at = head[:, None] * DIM + column[None, :]
        inside = (head < K_HEADS)[:, None] & (column < DIM)[None, :]
        turned = _turned(k + row * k_row, k_weight, of_row, sine, head, K_HEADS, eps, DIM, WIDTH)
        tl.store(k_pages + to + at, turned, mask=inside)
        tl.store(v_pages + to + at, tl.load(v + row * v_row + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["N"])
def gate_kernel(
    both,  # [N, 2 F]: gate, then up
    out,  # [N, F]
    N,
    F,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N.to(tl.int64) * F
    at = i // F * 2 * F + i % F
    gate, up = tl.load(both + at, mask=inside, other=0.0), tl.load(both + at + F, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(out + i, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def tile_of_sum(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the tile of a norm of a sum: that of a norm, with more warps for two rows of fp32."""
    tile = tile_of(width)
    if dtype == torch.float32:
        tile["num_warps"] = min(2 * tile["num_warps"], 16)
    return tile


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:  # [N, H] -> [N, H]
    """``x`` may be a product that is not added yet, [parts, N, H] fp32 (`kernels.linear.triton.unadded`)."""
    parts = len(x) if x is not None and x.dim() == 3 else 0
    rows, width = residual.shape
    out, tile = torch.empty_like(residual), tile_of_sum(width, residual.dtype)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        add_norm_kernel[grid](residual, x, weight, out, rows, width, eps, parts, **tile, enable_fp_fusion=False)
    return out


def rotate_and_store(
    q: Tensor,  # [N, Hq, D], rows at any stride, as k and v
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    q_weight: Tensor | None,  # [D]
    k_weight: Tensor | None,  # [D]
    eps: float,
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    slots: Tensor,  # [N]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    turns: Tensor | None = None,  # [N]; None: row n of cos and sin for row n
) -> None:
    rows, heads, dim = q.shape
    kv_heads, wide = k.shape[1], triton.next_power_of_2(dim)
    if rows:
        store_kernel[(rows,)](
            q, k, v, q_weight, k_weight, cos, sin, turns, slots, k_pages, v_pages,
            q.stride(0), k.stride(0), v.stride(0), eps, Q_HEADS=heads, K_HEADS=kv_heads, DIM=dim, WIDTH=wide,
            Q_TILE=min(triton.next_power_of_2(heads), HEADS), K_TILE=min(triton.next_power_of_2(kv_heads), HEADS),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def gated(both: Tensor) -> Tensor:  # [N, 2 F] -> [N, F]
    """Return ``round(gate / (1 + e^-gate)) * up``, gate and up side by side."""
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    if out.numel():
        grid = (triton.cdiv(out.numel(), BLOCK),)
        gate_kernel[grid](both, out, rows, width, BLOCK=BLOCK, enable_fp_fusion=False)
    return out


def decoder(
    model: DecoderParts,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: Nodes,
    work: Work,
    adapted: Adapted | None,
) -> Tensor:  # [N, H]
    """Like `reference.decoder`; float32 or bfloat16."""

    def attend(q: Tensor, pages: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        return tree_decode(q, *pages, nodes, work, model.scale, window, None)[0]

    return computed(model, input_ids, cos, sin, turns, slots, adapted, Passes(attend, several, F.linear, F.linear))


class Passes(NamedTuple):
    """The passes of a layer whose order of sums a backend chooses."""

    attend: Callable[[Tensor, tuple[Tensor, Tensor], int | None], Tensor]
    """Attention of queries [N, Hq, D] over a layer's pages, with its window."""
    several: Callable[[Tensor, list[Tensor], list[Tensor | None]], Tensor]
    """The products of rows with several weights, side by side."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """The product with one weight."""
    unadded: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """The same as `add_rms_norm` takes it."""


def computed(
    model: DecoderParts,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    adapted: Adapted | None,
    passes: Passes,
) -> Tensor:  # [N, H]
    """Like `reference.decoder`, by these passes."""

    def several_of(x: Tensor, w: LayerWeights, layer: int, *names: str) -> Tensor:
        weights = [getattr(w, name) for name in names]
        out = passes.several(x, weights, [getattr(w, f"{name}_bias", None) for name in names])
        if adapted is not None:
            for name, part in zip(names, out.split([len(weight) for weight in weights], dim=1), strict=True):
                part.copy_(_with_adapters(part.contiguous(), x, layer, name, adapted))
        return out

    def product_of(x: Tensor, w: LayerWeights, layer: int, name: str) -> Tensor:
        weight, bias = getattr(w, name), getattr(w, f"{name}_bias", None)
        if adapted is None:
            return passes.unadded(x, weight, bias)
        return _with_adapters(passes.linear(x, weight, bias), x, layer, name, adapted)

    residual, x = F.embedding(input_ids, model.embedding), None
    for n, (w, pages, window) in enumerate(zip(model.layers, model.pages, model.windows, strict=True)):
        normed = add_rms_norm(residual, x, w.input_norm, model.eps)
        qkv = several_of(normed, w, n, "q", "k", "v")
        heads = qkv.view(len(qkv), -1, cos.shape[1])
        queries, keys = len(w.q) // cos.shape[1], len(w.k) // cos.shape[1]
        q, k, v = heads.split((queries, keys, keys), dim=1)
        rotate_and_store(q, k, v, w.q_norm, w.k_norm, model.eps, cos, sin, slots, *pages, turns)
        seen = passes.attend(q, pages, window).flatten(1)
        normed = add_rms_norm(residual, product_of(seen, w, n, "o"), w.mlp_norm, model.eps)
        x = product_of(gated(several_of(normed, w, n, "gate", "up")), w, n, "down")
    return add_rms_norm(residual, x, model.norm, model.eps)


def _with_adapters(out: Tensor, x: Tensor, layer: int, name: str, adapted: Adapted) -> Tensor:
    add_low_rank_(out, x, adapted.adapters.layers[layer][PRODUCTS.index(name)], adapted.runs)
    return out
