"""C++ backend (``csrc/cpu/layer_ops.cpp``, ``csrc/cpu/silu_mul.cpp``), in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # [N, H], [H] -> [N, H], [N]
    return torch.ops.rolltree_cpu.rms_norm(x, weight, eps)


def rms_norm_backward(
    dy: Tensor,  # [N, H]
    x: Tensor,  # [N, H]
    weight: Tensor,  # [H]
    factor: Tensor,  # [N]
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    return torch.ops.rolltree_cpu.rms_norm_backward(dy, x, weight, factor, need_weight)


def rotate(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
    back: bool,
) -> tuple[Tensor, Tensor]:
    return torch.ops.rolltree_cpu.rotate(q, k, cos, sin, back)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.ops.rolltree_cpu.silu_mul(gate, up)


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.rolltree_cpu.silu_mul_backward(dy, gate, up)
