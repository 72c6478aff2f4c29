"""C++ backend (``csrc/cpu/tree_decode.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor


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
    partial_begin: Tensor | None,  # [N + 1] int32
    items: Tensor | None,  # [1 + I, FIELDS] int32
    partials: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    plan = (page_indptr, page_ids, node_offset, node_length, node_position, row_begin, row_end, query_position)
    return torch.ops.rolltree_cpu.tree_decode(q, k_pages, v_pages, *plan, scale, window, softcap)
