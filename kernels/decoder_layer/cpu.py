"""C++ backend (``csrc/cpu/decoder_layer.cpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .api import Decoder


def add_rms_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:  # [N, H] -> [N, H]
    return torch.ops.rolltree_cpu.add_rms_norm(residual, x, weight, eps)


def rotate_and_store(
    q: Tensor,  # [N, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    q_weight: Tensor | None,  # [D]
    k_weight: Tensor | None,  # [D]
    eps: float,
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
) -> None:
    torch.ops.rolltree_cpu.rotate_and_store(q, k, v, q_weight, k_weight, eps, cos, sin, slots, k_pages, v_pages)


def decoder(
    of: Decoder,
    input_ids: Tensor,  # [N] int32
    cos: Tensor,  # [T, D]
    sin: Tensor,  # [T, D]
    turns: Tensor | None,  # [N] int32
    slots: Tensor,  # [N] int32
    nodes: tuple[Tensor, ...],  # of the plan, in its order
) -> Tensor:  # [N, H]
    step = (cos, sin, turns, slots, *nodes, of.eps, of.scale, of.window_numbers)
    return torch.ops.rolltree_cpu.decoder(input_ids, of.embedding, of.every_weight, of.norm, of.every_page, *step)
