"""C++ backend of :func:`sample_tokens`: one call, rows in parallel (csrc/cpu/sampling.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_cpu(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32
    top_k: Tensor | None,  # [N] int32
    top_p: Tensor | None,  # [N] float32
    min_p: Tensor | None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.rolltree_cpu.sample_tokens(logits, temperature, top_k, top_p, min_p, seed, step)
