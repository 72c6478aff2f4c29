"""CUDA C++ backend (``csrc/cuda/tree_decode.cu``): bfloat16 and float16, head dimensions 64, 128 and 256."""

from __future__ import annotations

import torch
from torch import Tensor

from .work import QUERIES, programs, work_of

DIMS = (64, 128, 256)


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    page_indptr: Tensor,  # [K + 1] int32
    page_ids: Tensor,  # [*] int32
    node_offset: Tensor,  # [K] int32
    node_length: Tensor,  # [K] int32
    node_position: Tensor,  # [K] int32
    row_begin: Tensor,  # [K] int32
    row_end: Tensor,  # [K] int32
    query_position: Tensor,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
    most: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Raises ValueError for a dtype, head dimension, group or alignment that it does not know."""
    rows, heads, dim = q.shape
    group = heads // k_pages.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16) or dim not in DIMS or group > QUERIES:
        raise ValueError(
            f"The cuda backend of tree_decode_attention takes bfloat16 or float16, head dimensions {DIMS} and up to "
            f"{QUERIES} query heads a key head, not {q.dtype}, {dim} and {group}; leave the choice to the dispatcher."
        )
    if any(x.data_ptr() % 16 or any(s % 8 for s in x.stride()[:-1]) for x in (q, k_pages, v_pages)):
        raise ValueError(
            "The cuda backend of tree_decode_attention needs rows of q and of the pages aligned to 16 bytes."
        )
    plan = (page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position)
    out, lse = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if rows == 0 or len(node_length) == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    work = work_of(row_begin, row_end, node_length, rows, group, most)
    partial_out = q.new_empty((len(work.partial_ids), heads, dim), dtype=torch.float32)
    partial_lse = q.new_empty((len(work.partial_ids), heads), dtype=torch.float32)
    torch.ops.rolltree_cuda.tree_decode(
        q,
        k_pages,
        v_pages,
        *plan,
        *work,
        scale,
        window or 0,
        softcap or 0.0,
        programs(q.device),
        partial_out,
        partial_lse,
        out,
        lse,
    )
    return out, lse
