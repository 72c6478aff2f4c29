"""Row kernels of the CPU backend: C++ in csrc/cpu/linear_logprob.cpp. Signatures: `chunked.RowKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_MULTIPLE = 1  # rows of a tile lie end to end


def statistics(
    logits: Tensor,  # [C, V]
    bias: Tensor,  # [V] or [0]
    temperature: Tensor,  # [C]
    softcap: float,
    start: Tensor,  # [C + 1]
    target: Tensor,  # [M]
    logprob: Tensor,  # [M]
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    entropy: Tensor,  # [C] or [0]
    sum_p2: Tensor,  # [C] or [0]
) -> None:
    torch.ops.rolltree_cpu.logit_statistics(
        logits, bias, temperature, softcap, start, target, logprob, logsumexp, correction, entropy, sum_p2
    )


def gradient(
    logits: Tensor,  # [C, V]
    bias: Tensor,  # [V] or [0]
    temperature: Tensor,  # [C]
    softcap: float,
    start: Tensor,  # [C + 1]
    target: Tensor,  # [M]
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    grad_logprob: Tensor,  # [M]
    constant: Tensor,  # [C]
    per_log: Tensor,  # [C] or [0]
    per_p: Tensor,  # [C] or [0]
    out: Tensor,  # [C, V]
) -> None:
    torch.ops.rolltree_cpu.logit_gradient(
        logits,
        bias,
        temperature,
        softcap,
        start,
        target,
        logsumexp,
        correction,
        grad_logprob,
        constant,
        per_log,
        per_p,
        out,
    )
