"""C++ backend (``csrc/cpu/decoder_layer.cpp``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .api import LayerWeights


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


def decoder_layer(
    residual: Tensor,  # [N, H]
    w: LayerWeights,
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: tuple[Tensor, ...],  # of the plan, in its order
    eps: float,
    scale: float,
    window: int | None,
) -> None:
    step = (cos, sin, slots, k_pages, v_pages, *nodes)
    torch.ops.rolltree_cpu.decoder_layer(residual, *w.tensors, eps, *step, scale, window)
