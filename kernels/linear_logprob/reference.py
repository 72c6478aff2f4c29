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
from .chunked import RowInputs, kept_shape
from .chunked import coefficients as gradient_coefficients
from .head import Head, HeadGradient
from .targets import Targets

ROW_MULTIPLE = 1


def forward(
    hidden: Tensor,  # [N, H]
    head: Head,
    targets: Targets,
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    want_entropy: bool,
    want_sum_p2: bool,
    frozen_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob [M], logsumexp [N], correction [N], entropy [N], sum_p2 [N], kept)``; empty where not wanted.

    The backward reads the log-sum-exp with its rounding error, ``correction``. Without a frozen head the chunked
    backends keep logits for it; the definition does not use them.
    """
    u = product(hidden, head, temperature)
    N, new = len(hidden), temperature.new_empty
    logprob = new(len(targets.target))
    of_rows = new(N), new(N), new(N if want_entropy else 0), new(N if want_sum_p2 else 0)
    statistics(RowInputs(u, head.bias, temperature, softcap, targets.start, targets.target), logprob, *of_rows)
    kept = temperature.new_zeros(kept_shape(hidden, head.weight))
    if frozen_head:
        towards, constant = frozen.direction_coefficients(targets, temperature)
        absent, nothing = temperature.new_empty(0), HeadGradient(head, False, False, False)
        inputs = (hidden, head, targets, temperature, softcap, *of_rows[:2], absent, absent, absent)
        kept = backward(*inputs, towards, constant, absent, absent, True, nothing)
    return logprob, *of_rows, kept


def statistics(
    rows: RowInputs,
    logprob: Tensor,  # [M], out: only the targets of these rows
    logsumexp: Tensor,  # [C], out
    correction: Tensor,  # [C], out: exact log-sum-exp minus `logsumexp`
    entropy: Tensor,  # [C] or [0], out
    sum_p2: Tensor,  # [C] or [0], out
) -> None:
    """Fill the statistics of the rows and the log-probs of their targets."""
    z = scaled(rows.logits, rows.bias, rows.temperature, rows.softcap)
    logp = torch.log_softmax(z, dim=-1)
    p = logp.exp()
    row, here = _row_of_targets(rows.start)
    logprob[here] = logp[row, rows.target[here]].to(logprob.dtype)
    exact = torch.where(z.amax(-1) == torch.inf, torch.nan, torch.logsumexp(z, dim=-1))
    logsumexp.copy_(exact)
    correction.copy_(exact - logsumexp)
    if len(entropy):
        entropy.copy_(-torch.where(p > 0, p * logp, p).sum(-1))
    if len(sum_p2):
        sum_p2.copy_((p * p).sum(-1))


def exponentials(
    rows: RowInputs,  # without softcap
    logprob: Tensor,  # [M], out
    logsumexp: Tensor,  # [C], out
    correction: Tensor,  # [C], out
    entropy: Tensor,  # [C], out
    base: Tensor,  # [C], out
    out: Tensor,  # [C, V], out
) -> None:
    """Fill the statistics of the rows, and ``out = exp(z - base)``, from which the two products of the gradient follow:
    dL/du = (a onehot - sum(a) exp(base - logsumexp) out) / temperature.

    The base is the largest logit of the row's targets, or of the row where that is more than 30 larger. It is 0, and so
    are the exponentials, where a logit is NaN or +inf.
    """
    statistics(rows, logprob, logsumexp, correction, entropy, entropy[:0])
    z = scaled(rows.logits, rows.bias, rows.temperature, 0.0)
    row, here = _row_of_targets(rows.start)
    target = rows.target[here]
    inside = (target >= 0) & (target < z.shape[1])
    highest = torch.full_like(z[:, 0], -torch.inf).index_reduce_(
        0, row[inside], z[row[inside], target[inside]], "amax", include_self=True
    )
    highest = torch.where(highest.isfinite(), highest, 0)
    most, sound = z.amax(-1), ~logsumexp.isnan()
    finite = torch.where(most.isfinite(), most, 0)
    chosen = torch.where(sound, torch.where(most - highest > 30, finite, highest), 0)
    base.copy_(chosen)
    out.copy_(torch.where(sound[:, None], (z - chosen[:, None]).exp(), 0))


def backward(
    hidden: Tensor,  # [N, H]
    head: Head,
    targets: Targets,
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
    """Return the gradient of hidden ``[N, H]``, or ``[0]``; those of the head are added to ``need``."""
    u = product(hidden, head, temperature)
    coefficients = gradient_coefficients(entropy, sum_p2, grad_logsumexp, grad_entropy, grad_sum_p2)
    du = torch.empty_like(u)
    rows = RowInputs(u, head.bias, temperature, softcap, targets.start, targets.target)
    gradient(rows, logsumexp, correction, grad_logprob, *coefficients, du)
    d_weight = du.T @ hidden.to(du.dtype)  # of the effective weight
    if need.need_weight:
        need.add_sum("weight", d_weight)
    if need.need_bias:
        need.add_sum("bias", du.sum(0))
    if need.need_lora and head.lora is not None:
        a, b, scale = head.lora
        need.add_sum("a", scale * b.to(du.dtype).T @ d_weight)
        need.add_sum("b", scale * d_weight @ a.to(du.dtype).T)
    return (du @ effective_weight(head, du.dtype)).to(hidden.dtype) if need_hidden else hidden.new_empty(0)


def gradient(
    rows: RowInputs,
    logsumexp: Tensor,  # [C]
    correction: Tensor,  # [C]
    grad_logprob: Tensor,  # [M], in row order: a
    constant: Tensor,  # [C]: c
    per_log: Tensor,  # [C] or [0]: b
    per_p: Tensor,  # [C] or [0]: q
    out: Tensor,  # [C, V], out: may be the logits, may have the operands' dtype
) -> None:
    """Fill ``dL/du_j = (sum_m a_m (1[j = y_m] - p_j) + p_j (c - b log p_j + q p_j)) dz/du``; see `coefficients`.

    The log-sum-exp is read, not computed again: with a vocabulary split over ranks it is that of all shards.
    """
    z = scaled(rows.logits, rows.bias, rows.temperature, rows.softcap)
    logp = z - (logsumexp.double() + correction)[:, None]
    p = logp.exp()
    row, here = _row_of_targets(rows.start)
    a = grad_logprob[here].to(z.dtype)
    onehot = torch.zeros_like(z).index_put((row, rows.target[here]), a, accumulate=True)
    dz = onehot + p * (constant - onehot.sum(-1))[:, None]
    if len(per_p):
        dz += p * p * per_p[:, None]
    if len(per_log):
        dz -= torch.where(p > 0, p * logp, p) * per_log[:, None]
    temperature = rows.temperature[:, None]
    du = dz / temperature
    if rows.softcap:
        du = du * (1 - (z * temperature / rows.softcap).square())
    out.copy_(du)


def _row_of_targets(start: Tensor) -> tuple[Tensor, slice]:
    """Return the row of each target of these rows, and the slice of the targets that are theirs."""
    rows = torch.arange(len(start) - 1, device=start.device)
    return torch.repeat_interleave(rows, start.diff()), slice(int(start[0]), int(start[-1]))


def product(hidden: Tensor, head: Head, temperature: Tensor) -> Tensor:
    """Return the logits without bias ``[N, V]``, in the dtype of ``temperature``."""
    return hidden.to(temperature.dtype) @ effective_weight(head, temperature.dtype).T


def scaled(u: Tensor, bias: Tensor, temperature: Tensor, softcap: float) -> Tensor:
    """Return ``z`` of the module docstring, ``[N, V]`` fp64, from logits u without bias; bias is ``[V]`` or ``[0]``."""
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
