"""The definition of `linear_logprob`, in plain PyTorch over the whole ``[N, V]`` logits.

    u = hidden (weight + scale b a)^T + bias        z = softcap tanh(u / softcap) / temperature
    logprob_m = z[row_m, target_m] - lse[row_m]     lse_i = log sum_j exp(z_ij)
    entropy_i = lse_i - sum_j p_ij z_ij             sum_p2_i = sum_j p_ij^2,     p = exp(z - lse)

with the products in fp32 (fp64 for fp64 inputs) and the row formulas in fp64. The gradient is written out instead of
left to autograd because custom ops run below autograd; fp64 gradcheck ties it to the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import frozen
from .chunked import kept_shape
from .head import Head, HeadGradient
from .pairs import Pairs


def forward(
    hidden: Tensor,  # [N, H]
    head: Head,
    pairs: Pairs,
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    want_entropy: bool,
    want_sum_p2: bool,
    frozen_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N], kept)``; empty where not wanted.

    The chunked backends use ``correction`` (what rounding took from the log-sum-exp) and, without a frozen head, logits
    kept for the backward; the definition has no use for them.
    """
    z = scaled(product(hidden, head, temperature), head.bias, temperature, softcap)
    kept = temperature.new_zeros(kept_shape(hidden, head.weight))
    if frozen_head:
        towards, constant = frozen.direction_coefficients(pairs, temperature)
        absent, nothing = temperature.new_empty(0), HeadGradient(head, False, False, False)
        given = (hidden, head, pairs, temperature, softcap, absent, absent, absent, absent, absent)
        kept = backward(*given, towards, constant, absent, absent, True, nothing)
    return *statistics(z, pairs, temperature, want_entropy, want_sum_p2), kept


def statistics(
    z: Tensor,  # [N, V] fp64
    pairs: Pairs,
    temperature: Tensor,  # [N], only for its dtype, which the results have
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N])``; empty where not wanted."""
    dtype = temperature.dtype
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    return (
        logp[pairs.row, pairs.target].to(dtype),
        torch.where(z.amax(-1) == torch.inf, torch.nan, torch.logsumexp(z, dim=-1)).to(dtype),
        temperature.new_zeros(len(z)),
        -torch.where(p > 0, p * logp, p).sum(-1).to(dtype) if want_entropy else temperature.new_empty(0),
        (p * p).sum(-1).to(dtype) if want_sum_p2 else temperature.new_empty(0),
    )


def backward(
    hidden: Tensor,  # [N, H]
    head: Head,
    pairs: Pairs,
    temperature: Tensor,  # [N]
    softcap: float,
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N], or [0] where it has no gradient
    sum_p2: Tensor,  # [N], or [0]
    logits: Tensor,
    grad_logprob: Tensor,  # [M], in row order
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N], or [0]
    grad_sum_p2: Tensor,  # [N], or [0]
    need_hidden: bool,
    need: HeadGradient,
) -> Tensor:
    """Gradient of hidden ``[N, H]``, or ``[0]``; those of the head are added to ``need``."""
    z = scaled(product(hidden, head, temperature), head.bias, temperature, softcap)
    grads = grad_logprob, grad_logsumexp, grad_entropy, grad_sum_p2
    du = gradient(z, pairs, temperature, softcap, entropy, sum_p2, *grads)
    d_weight = du.T @ hidden.to(du.dtype)  # of the effective weight
    if len(need.weight):
        need.weight += d_weight
    if len(need.bias):
        need.bias += du.sum(0)
    if len(need.a) and head.lora is not None:
        a, b, scale = head.lora
        need.a += scale * b.to(du.dtype).T @ d_weight
        need.b += scale * d_weight @ a.to(du.dtype).T
    return (du @ effective_weight(head, du.dtype)).to(hidden.dtype) if need_hidden else hidden.new_empty(0)


def gradient(
    z: Tensor,  # [N, V] fp64
    pairs: Pairs,
    temperature: Tensor,  # [N]
    softcap: float,
    entropy: Tensor,  # [N], or [0] where it has no gradient
    sum_p2: Tensor,  # [N], or [0]
    grad_logprob: Tensor,  # [M], in row order
    grad_logsumexp: Tensor,  # [N]
    grad_entropy: Tensor,  # [N], or [0]
    grad_sum_p2: Tensor,  # [N], or [0]
) -> Tensor:
    """Gradient of the logits u ``[N, V]``, in the dtype of ``temperature``."""
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    onehot = torch.zeros_like(z).index_put((pairs.row, pairs.target), grad_logprob.to(z.dtype), accumulate=True)
    dz = onehot + p * (grad_logsumexp - onehot.sum(-1))[:, None]
    if len(grad_sum_p2):
        dz += 2 * p * (p - sum_p2[:, None]) * grad_sum_p2[:, None]
    if len(grad_entropy):
        dz -= torch.where(p > 0, p * (logp + entropy[:, None]), p) * grad_entropy[:, None]
    du = dz / temperature[:, None]
    if softcap:
        du = du * (1 - (z * temperature[:, None] / softcap).square())
    return du.to(temperature.dtype)


def product(hidden: Tensor, head: Head, temperature: Tensor) -> Tensor:
    """Logits without bias ``[N, V]``, in the dtype of ``temperature``."""
    return hidden.to(temperature.dtype) @ effective_weight(head, temperature.dtype).T


def scaled(u: Tensor, bias: Tensor, temperature: Tensor, softcap: float) -> Tensor:
    """``z`` of the module docstring: ``[N, V]`` fp64, from logits u without bias; bias ``[V]`` or ``[0]``."""
    u = u.double()
    if len(bias):
        u = u + bias
    if softcap:
        u = softcap * torch.tanh(u / softcap)
    return u / temperature[:, None]


def effective_weight(head: Head, dtype: torch.dtype) -> Tensor:  # [V, H]
    weight = head.weight.to(dtype)
    if head.lora is None:
        return weight
    a, b, scale = head.lora
    return weight + scale * b.to(dtype) @ a.to(dtype)
