"""Operands whose sums cancel: only their rounding is left, which any other order of sums changes, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def cancelling(
    rows: int, width: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [rows, depth], weight [width, depth] and bias [width] of random numbers and their negatives."""
    random = torch.Generator().manual_seed(width * depth)
    half = depth // 2
    x, weight = (torch.randn(n, half, generator=random) for n in (rows, width))
    order = torch.randperm(half, generator=random)
    rest = 2**-20 * torch.randn(depth - 2 * half, generator=random)
    x = torch.cat([x, x[:, order], rest.expand(rows, -1)], 1)
    weight = torch.cat([weight, -weight[:, order], rest.expand(width, -1)], 1)
    bias = 2**-20 * torch.randn(width, generator=random)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)
