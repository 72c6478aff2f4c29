"""The backward of a head that is not trained: no logits, no recomputation, for any objective.

With one target y a row, dlogprob/dhidden = U = (s_y W_y - P), P = sum_v p_v s_v W_v, where s is dz/du (1 / temperature
without softcap). The forward, which has the probabilities, keeps U (of the row's first target; -P where a row
has none), so the backward of ``logprob`` scales its rows. Further targets of a row differ from the first by rows of W
alone, and the gradient of ``logsumexp`` is P = s_y W_y - U.

U is kept instead of P because it is small where the policy is sure of y, and rounding it to half precision is then
relative to that small value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .head import Head
from .targets import Targets, sum_by_row

TARGETS_AT_ONCE = 4096


def direction_coefficients(targets: Targets, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``grad_logprob [M]`` and ``constant [N]`` for which the gradient of the logits becomes that of U."""
    if targets.one_a_row:
        return like.new_ones(len(targets.target)), like.new_zeros(len(targets.start) - 1)
    first, has = targets.start[:-1], targets.start[:-1] < targets.start[1:]
    of_first = like.new_zeros(len(targets.target) + 1)
    of_first[torch.where(has, first, len(targets.target))] = 1  # rows without a target write into the last slot
    return of_first[:-1], -(~has).to(like.dtype)


def backward(
    head: Head,
    targets: Targets,
    temperature: Tensor,  # [N]
    softcap: float,
    logprob: Tensor,  # [M], in row order
    logsumexp: Tensor,  # [N]
    direction: Tensor,  # [N, H]
    grad_logprob: Tensor,  # [M], in row order
    grad_logsumexp: Tensor | None,  # [N]
) -> Tensor:
    """Return the gradient of hidden ``[N, H]``, in the dtype of ``direction``."""
    if targets.one_a_row and grad_logsumexp is None:
        return (grad_logprob[:, None] * direction).to(direction.dtype)
    row = targets.row
    slope = 1 / temperature[row]
    if softcap:
        z = logprob + logsumexp[row]
        slope = slope * (1 - (z * temperature[row] / softcap).square())
    towards = sum_by_row(targets, grad_logprob)
    if grad_logsumexp is not None:
        towards = towards - grad_logsumexp
    first, _ = direction_coefficients(targets, grad_logprob)
    of_weight = (grad_logprob - first * towards[row]) * slope  # [M]: 0 for the only target of a row
    total = towards[:, None] * direction.to(logsumexp.dtype)
    for begin in range(0, len(targets.target), TARGETS_AT_ONCE):
        part = slice(begin, begin + TARGETS_AT_ONCE)
        rows = of_weight[part, None] * head.rows(targets.target[part])
        total.index_put_((row[part],), rows, accumulate=True)  # sorted, not atomic: the order of the sum is fixed
    return total.to(direction.dtype)
