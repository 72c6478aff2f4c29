"""CUDA C++ backend (``csrc/cuda/tree_decode.cu``): bfloat16 and float16, head dimensions 64, 128 and 256, pages of
a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from .items import QUERIES
from .schedule import SAME_STRIDES, Nodes, Work, make_schedule, programs

DIMS = (64, 128, 256)


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: Nodes,
    work: Work,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_decode`.

    Raises:
        ValueError: the kernels do not take the dtype, head dimension, group, page size or alignment.
    """
    rows, heads, dim = q.shape
    kv_heads, page = k_pages.shape[2], k_pages.shape[1]
    group = heads // kv_heads
    if q.dtype not in (torch.bfloat16, torch.float16) or dim not in DIMS or group > QUERIES or page & (page - 1):
        raise ValueError(
            f"The cuda backend of tree_decode_attention takes bfloat16 or float16, head dimensions {DIMS}, up to "
            f"{QUERIES} query heads a key head and pages of a power of two, not {q.dtype}, {dim}, {group} and {page}; "
            "leave the choice to the dispatcher."
        )
    if any(x.data_ptr() % 16 or any(s % 8 for s in x.stride()[:-1]) for x in (q, k_pages, v_pages)):
        raise ValueError(
            "The cuda backend of tree_decode_attention needs rows of q and of the pages aligned to 16 bytes."
        )
    if k_pages.stride() != v_pages.stride():
        raise ValueError(SAME_STRIDES)
    out, lse = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if rows == 0 or len(nodes.node_length) == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    if work.partial_begin is None or work.items is None or work.parent is not None:
        work = make_schedule(nodes, group)
    partial_begin, items, partials, _ = work
    partial_out = q.new_empty((partials, heads, dim), dtype=torch.float32)
    partial_lse = q.new_empty((partials, heads), dtype=torch.float32)
    torch.ops.rolltree_cuda.tree_decode(
        q,
        k_pages,
        v_pages,
        nodes.page_ids,
        nodes.query_position,
        partial_begin,
        items,
        scale,
        window or 0,
        softcap or 0.0,
        programs(q.device, kv_heads),
        partial_out,
        partial_lse,
        out,
        lse,
    )
    return out, lse
