"""C++ backend (``csrc/cpu/tree_attention.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    return torch.ops.rolltree_cpu.tree_attention(q, k, v, subtree_end, position, scale, window, softcap)


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.rolltree_cpu.tree_attention_backward(
        grad_out, q, k, v, out, lse, subtree_end, position, scale, window, softcap
    )
