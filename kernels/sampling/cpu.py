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
    token, last_kept = torch.empty_like(seed), torch.empty_like(seed)  # cheaper here than through the stable ABI
    logprob, raw_logprob, entropy = (torch.empty_like(temperature) for _ in range(3))
    out = token, logprob, raw_logprob, entropy, last_kept
    torch.ops.rolltree_cpu.sample_tokens(logits, temperature, top_k, top_p, min_p, seed, step, *out)
    return out
