"""Triton backend: tiles, lists of visible blocks and launches of the kernels in `triton_forward`, `triton_backward`.

Row i sees key j iff j <= i < subtree_end[j]. The T rows of q are the last of N: the first ``offset`` = N - T keys
belong to an earlier piece of the tree. A block of rows (dK/dV: of keys) walks the list of wholly visible blocks without
a mask, then the list of partly visible ones with a compare (`visible`). All heads of the heaviest block start first.

T and N are run-time values; compiled once for each head size, dtype, group and set of options.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .. import machine
from .blocks import LARGEST, Tiles, padded_width, tiles_for
from .reference import Scoring
from .triton_backward import add_kernel, dkdv_kernel, dq_kernel
from .triton_forward import forward_kernel
from .triton_tiles import LN2, log2_scores
from .visible import heavy_first, mask_of, work_items

__all__ = ["LN2", "log2_scores", "tree_attention_backward", "tree_attention_forward"]  # the first two for decoding

ADDED_LINES = 16  # keys that a program of add_kernel takes


def _tiles(q: Tensor, softcap: float | None) -> Tiles:
    major = machine.gpu_capability(q.device)[0]
    return tiles_for(q.shape[2], q.dtype, major=major, softcap=softcap is not None)


def aligned(t: Tensor) -> Tensor:  # [T, Hq, D]
    """Return ``t``, or a copy if the rows of its heads could begin at a multiple of 16 bytes and do not."""
    unit = 16 // t.element_size()
    if t.shape[2] % unit or (t.data_ptr() % 16 == 0 and t.stride(0) % unit == 0 and t.stride(1) % unit == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _bf16_interpreted(q: Tensor) -> bool:
    """Return True where the kernels run in fp32: Triton's interpreter multiplies the bit patterns of bf16 operands."""
    return machine.interpreting() and q.dtype == torch.bfloat16


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_attention_forward`; float32, bfloat16 or float16."""
    if _bf16_interpreted(q):
        wide = q.float(), k.float(), v.float()
        out, lse = tree_attention_forward(*wide, scoring)
        return out.to(q.dtype), lse
    subtree_end, position, scale, window, softcap = scoring
    if scale < 0:  # the kernel takes the largest score before it scales
        return tree_attention_forward(-q, k, v, scoring._replace(scale=-scale))
    rows, heads, dim = q.shape
    tokens, offset = len(k), len(k) - rows
    out = q.new_empty(q.shape)
    lse = q.new_empty((heads, rows), dtype=torch.float32)
    if rows == 0:
        return out, lse
    tile = _tiles(q, softcap).forward
    visible, order = heavy_first(subtree_end, position, window, tile, offset)
    forward_kernel[(heads, triton.cdiv(rows, tile.rows))](
        q, k, v, out, lse, *visible, order, *mask_of(subtree_end, position, window, offset),
        tokens, offset, visible.blocks.shape[1], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        max(scale, torch.finfo(torch.float32).tiny), window or 0, softcap or 0.0,
        HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, WIDTH=padded_width(dim), ROWS=tile.rows, KEYS=tile.keys,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `reference.tree_attention_backward`; float32, bfloat16 or float16."""
    if _bf16_interpreted(q):
        wide = grad_out.float(), q.float(), k.float(), v.float(), out.float()
        grads = tree_attention_backward(*wide, lse, scoring)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    subtree_end, position, scale, window, softcap = scoring
    rows, heads, dim = q.shape
    tokens, offset, kv_heads = len(k), len(k) - rows, k.shape[1]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if rows == 0:
        return dq, dk.zero_(), dv.zero_()
    out, lse, q, grad_out = out.contiguous(), lse.contiguous(), aligned(q), aligned(grad_out)
    tiles, width = _tiles(q, softcap), padded_width(dim)
    row_sums = lse.new_empty((heads, 2 * LARGEST * triton.cdiv(rows, LARGEST)))
    visible, order = heavy_first(subtree_end, position, window, tiles.dq, offset)
    mask = mask_of(subtree_end, position, window, offset)
    strides = [s for t in (grad_out, q, k, v) for s in t.stride()[:2]]
    options = {
        "HEADS": heads, "GROUP": heads // kv_heads, "DIM": dim, "WIDTH": width, "FILL": LARGEST,
        "HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None, "enable_fp_fusion": True,
    }  # fmt: skip
    tile = tiles.dq
    dq_kernel[(heads, triton.cdiv(rows, tile.rows))](
        grad_out, q, k, v, out, lse, row_sums, dq, *visible, order, *mask,
        tokens, offset, visible.blocks.shape[1], *strides, scale, window or 0, softcap or 0.0,
        PACK=tiles.dkdv.rows, ROWS=tile.rows, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    tile = tiles.dkdv
    programs = kv_heads * tile.parts
    visible, work = work_items(subtree_end, position, window, tile, offset, programs, heads // kv_heads)
    columns = {"DIM": dim // tile.parts, "WIDTH": width // tile.parts}
    sums = lse.new_empty((programs, work.slots, 2, tile.keys, columns["WIDTH"]))
    dkdv_kernel[(programs, len(work.items))](
        grad_out, q, k, v, row_sums, dk, dv, sums, work.items, *visible, *mask,
        tokens, offset, visible.blocks.shape[1], work.slots, *strides, scale, window or 0, softcap or 0.0,
        ROWS=tile.rows, KEYS=tile.keys, PARTS=tile.parts, num_warps=tile.warps, num_stages=tile.stages,
        **{**options, **columns},
    )  # fmt: skip
    if len(work.splits):
        lines = min(tile.keys, ADDED_LINES)
        add_kernel[(programs, len(work.splits), tile.keys // lines)](
            sums, work.splits, dk, dv, tokens, work.slots, kv_heads * dim,
            KEYS=tile.keys, LINES=lines, num_warps=4, enable_fp_fusion=True, **columns,
        )  # fmt: skip
    return dq, dk, dv
