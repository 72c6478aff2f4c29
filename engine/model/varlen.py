"""Causal attention of plain sequences laid end to end, by flash-attn if installed, else by torch's own kernel.

A tree with few shared tokens gains nothing from tree attention; its leaves are then packed as sequences, for which
existing kernels are the fastest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]


@functools.cache
def kernel() -> Kernel | None:
    """Return ``(q, k, v [T, H, D], cu_seqlens [B + 1], longest, scale, window) -> [T, Hq, D]``, or None."""
    if not torch.cuda.is_available():
        return None
    return _flash_attn() or _torch()


def fits(query: Tensor, softcap: float | None) -> bool:
    """Return True if the kernels support this query: on CUDA, 16 bits, their head sizes, no softcap."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] in (64, 96, 128, 256) and softcap is None


def _flash_attn() -> Kernel | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int | None
    ) -> Tensor:
        left = -1 if window is None else window - 1
        out: Tensor = flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=(left, -1)
        )
        return out

    return attend


def _torch() -> Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"window_size", "scale", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None  # an early version without these options

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int | None
    ) -> Tensor:
        reach = (-1 if window is None else window - 1, 0)  # tokens to the left and to the right
        shared_heads = q.shape[1] != k.shape[1]
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=reach, enable_gqa=shared_heads)
        assert isinstance(out, Tensor)
        return out

    return attend
