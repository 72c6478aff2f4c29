"""The definitions in plain PyTorch, forwards rounding by rounding as the modules of Transformers, gradients in closed
form as the kernels compute them: in float32 (float64 for float64), rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # [N, H], [H] -> [N, H], [N]
    """Return the rows' norms, and the factor that each was multiplied with, in float32."""
    wide = _wide(x)
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * factor).to(x.dtype), factor.squeeze(-1)


def rms_norm_backward(
    dy: Tensor,  # [N, H]
    x: Tensor,  # [N, H]
    weight: Tensor,  # [H]
    factor: Tensor,  # [N]
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight; the latter is empty where it is not needed."""
    grad, wide, r = _wide(dy), _wide(x), factor[:, None]
    g = grad * _wide(weight)
    dx = r * (g - wide * ((g * wide).mean(-1, keepdim=True) * r * r))
    dweight = (grad * (wide * r)).sum(0) if need_weight else weight.new_empty(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def rotate(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated; with ``back`` the gradients for gradients of rotated ones."""
    one = _turned_back if back else _turned
    return _like(q, one(q, cos[:, None], sin[:, None])), _like(k, one(k, cos[:, None], sin[:, None]))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _turned_back(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    grad, wide_cos, wide_sin = _wide(dy), _wide(cos), _wide(sin)
    low, high = (grad * wide_sin).chunk(2, dim=-1)
    return grad * wide_cos + torch.cat((high, -low), dim=-1)


def _like(x: Tensor, values: Tensor) -> Tensor:
    """Return the values in the memory layout of `torch.empty_like`, which the op promises."""
    return torch.empty_like(x).copy_(values)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, x = _wide(dy), _wide(gate)
    s = torch.sigmoid(x)
    dgate = grad * _wide(up) * (s * (1 + x * (1 - s)))
    return dgate.to(gate.dtype), (grad * (x * s)).to(up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
