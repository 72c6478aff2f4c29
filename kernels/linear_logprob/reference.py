"""The definition of `linear_logprob`, in plain PyTorch over the whole ``[N, V]`` logits.

    u = hidden weight^T + bias                      z = softcap tanh(u / softcap) / temperature
    logprob_m = z[row_m, target_m] - lse[row_m]     lse_i = log sum_j exp(z_ij)
    entropy_i = lse_i - sum_j p_ij z_ij             sum_p2_i = sum_j p_ij^2,     p = exp(z - lse)

with the products in fp32 (fp64 for fp64 inputs) and the row formulas in fp64. The gradient is written out instead of
left to autograd because custom ops run below autograd; fp64 gradcheck ties it to the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunked import kept_shape


def forward(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    bias: Tensor | None,  # [V]
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N], logits)``; empty where not wanted.

    The chunked backends use ``correction`` and ``logits`` (what rounding took from the log-sum-exp; logits kept for the
    backward); the definition has no use for them.
    """
    z = scaled(product(hidden, weight, temperature), bias, temperature, softcap)
    outputs = statistics(z, target, row, temperature, want_entropy, want_sum_p2)
    return (*outputs, temperature.new_zeros(kept_shape(hidden, weight)))


def statistics(
    z: Tensor,  # [N, V] fp64
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N], only for its dtype, which the results have
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N])``; empty where not wanted."""
    dtype = temperature.dtype
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    row = torch.arange(len(target), device=target.device) if row is None else row
    return (
        logp[row, target].to(dtype),
        torch.where(z.amax(-1) == torch.inf, torch.nan, torch.logsumexp(z, dim=-1)).to(dtype),
        temperature.new_zeros(len(z)),
        -torch.where(p > 0, p * logp, p).sum(-1).to(dtype) if want_entropy else temperature.new_empty(0),
        (p * p).sum(-1).to(dtype) if want_sum_p2 else temperature.new_empty(0),
    )


def backward(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    bias: Tensor | None,  # [V]
    temperature: Tensor,  # [N]
    softcap: float,
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N], or [0] where it has no gradient
    sum_p2: Tensor,  # [N], or [0]
    logits: Tensor,
    grad_logprob: Tensor,  # [M]
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N], or [0]
    grad_sum_p2: Tensor,  # [N], or [0]
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; empty where not needed."""
    z = scaled(product(hidden, weight, temperature), bias, temperature, softcap)
    du = gradient(
        z,
        target,
        row,
        temperature,
        softcap,
        entropy,
        sum_p2,
        grad_logprob,
        grad_logsumexp,
        grad_entropy,
        grad_sum_p2,
    )
    return (
        (du @ weight.to(du.dtype)).to(hidden.dtype) if need_hidden else hidden.new_empty(0),
        (du.T @ hidden.to(du.dtype)).to(weight.dtype) if need_weight else hidden.new_empty(0),
        du.sum(0).to(weight.dtype) if need_bias else hidden.new_empty(0),
    )


def gradient(
    z: Tensor,  # [N, V] fp64
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,
    entropy: Tensor,  # [N], or [0] where it has no gradient
    sum_p2: Tensor,  # [N], or [0]
    grad_logprob: Tensor,  # [M]
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N], or [0]
    grad_sum_p2: Tensor,  # [N], or [0]
) -> Tensor:
    """Gradient of the logits u ``[N, V]``, in the dtype of ``temperature``."""
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    row = torch.arange(len(target), device=target.device) if row is None else row
    onehot = torch.zeros_like(z).index_put((row, target), grad_logprob.to(z.dtype), accumulate=True)
    dz = onehot + p * (grad_logsumexp - onehot.sum(-1))[:, None]
    if len(grad_sum_p2):
        dz += 2 * p * (p - sum_p2[:, None]) * grad_sum_p2[:, None]
    if len(grad_entropy):
        dz -= torch.where(p > 0, p * (logp + entropy[:, None]), p) * grad_entropy[:, None]
    du = dz / temperature[:, None]
    if softcap:
        du = du * (1 - (z * temperature[:, None] / softcap).square())
    return du.to(temperature.dtype)


def product(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """``hidden weight^T``: ``[N, V]``, in the dtype of ``temperature``."""
    return hidden.to(temperature.dtype) @ weight.to(temperature.dtype).T


def scaled(u: Tensor, bias: Tensor | None, temperature: Tensor, softcap: float) -> Tensor:
    """``z`` of the module docstring: ``[N, V]`` fp64, from logits u without bias."""
    u = u.double()
    if bias is not None:
        u = u + bias
    if softcap:
        u = softcap * torch.tanh(u / softcap)
    return u / temperature[:, None]
