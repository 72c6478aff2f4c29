"""The definition of `linear_divergence` for rows of logits, in plain PyTorch and fp64.

    z = softcap tanh(u / softcap) / temperature, of either model        log q = log_softmax(z), log p of the teacher
    D = sum_v phi(p_v, q_v)                                              dD / dz_j = q_j (g_j - sum_v q_v g_v)

with phi and g of `kinds`. The gradient is written out because custom ops run below autograd; fp64 gradcheck ties it to
the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear_logprob.reference import scaled
from .chunked import RowLogits
from .kinds import KINDS, Kind, summands

ROW_MULTIPLE = 1


def divergence(
    student: RowLogits,
    teacher: RowLogits,
    kind: int,
    share: float,
    factor: Tensor,  # [C]: the gradient of the loss with respect to the divergence
    divergence: Tensor,  # [C], out
    entropy: Tensor,  # [C], out: the student's
    teacher_entropy: Tensor,  # [C], out
    out: Tensor,  # [C, V], out: the gradient of the student's logits; may be these; or [0, V]: none
) -> None:
    """Fill the divergence of the rows, both entropies, and the gradient of the student's logits."""
    z = scaled(*student)
    log_q, log_p = z.log_softmax(-1), scaled(*teacher).log_softmax(-1)
    phi, qg = summands(Kind(KINDS[kind], share), log_p, log_q)
    divergence.copy_(phi.sum(-1))
    for values, log in ((entropy, log_q), (teacher_entropy, log_p)):
        probability = log.exp()
        values.copy_(-torch.where(probability > 0, probability * log, probability).sum(-1))
    if not len(out):
        return
    temperature = student.temperature[:, None]
    du = (qg - log_q.exp() * qg.sum(-1, keepdim=True)) * (factor[:, None] / temperature)
    if student.softcap:
        du = du * (1 - (z * temperature / student.softcap).square())
    out.copy_(du)
