"""The KL divergence of the policy's distributions from a reference's, over the vocabulary, as a column of trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batches.batch import TreeBatch
from ..batches.device import to_device
from ..data.statistics import DIVERGENCE
from ..data.tree import TokenTree
from .decoder import target_hidden
from .head import Head, head
from .roles import Role, write_column

ROWS, COLUMNS = 1024, 4096
"""Largest block of logits: distributions, ids of the vocabulary."""


class Divergence(Role):
    """Writes ``KL(policy || reference)`` (nats) at every response token; costs a forward of each without gradient.

    The reference's weights take their place once for all batches; the policy's hidden states wait in the host's memory.

    Args:
        model: the policy.
        reference: the role of the reference.
    """

    def __init__(self, model: PreTrainedModel, reference: Role) -> None:
        super().__init__(DIVERGENCE, model, replays_routes=True)
        self._reference = reference

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        other, device, was_training = self._reference.model, self.model.device, self.model.training
        self.model.eval()
        with torch.no_grad():
            hidden, policy_head = (
                [target_hidden(self.model, batch.to(device)).cpu() for batch in batches],
                _kept(self.model),
            )
            with self._reference.computing():
                for policy_hidden, waiting in zip(hidden, batches, strict=True):
                    temperatures = to_device(waiting.temperatures(temperature), device)
                    other_hidden = target_hidden(other, waiting.without_routes().to(device))
                    kl = divergence(policy_hidden.to(device), policy_head, other_hidden, head(other), temperatures)
                    write_column(trees, waiting, self.column, kl)
        self.model.train(was_training)
        return [self.model, other]


def _kept(model: PreTrainedModel) -> Head:
    """Return the head of ``model`` with its present weights, also while others take their place."""
    lm_head = head(model)
    lora = lm_head.lora
    return lm_head._replace(
        weight=lm_head.weight.detach(),
        bias=None if lm_head.bias is None else lm_head.bias.detach(),
        lora=None if lora is None else lora._replace(a=lora.a.detach(), b=lora.b.detach()),
    )


def divergence(
    hidden: Tensor,  # [M, H]
    policy_head: Head,
    other_hidden: Tensor,  # [M, H]
    other: Head,
    temperature: float | Tensor,  # one for all, or [M]
) -> Tensor:
    """Return ``KL(p || q)`` ``[M]`` fp32 (nats), p of ``policy_head`` and q of ``other``, without gradient.

    Equal heads and hidden states give exactly 0. The logits are computed in fp32, in blocks of at most `ROWS` x
    `COLUMNS`; each is read once.
    """
    kl = hidden.new_empty(len(hidden), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS):
        rows = slice(begin, begin + ROWS)
        of_rows = temperature[rows, None] if isinstance(temperature, Tensor) else temperature
        kl[rows] = _of_rows(hidden[rows], policy_head, other_hidden[rows], other, of_rows)
    return kl


def _of_rows(
    hidden: Tensor, policy_head: Head, other_hidden: Tensor, other: Head, temperature: float | Tensor
) -> Tensor:
    """Return ``sum_v p_v (a_v - b_v) - lse(a) + lse(b)`` of rows' logits a and b."""
    top = other_top = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    total = other_total = apart = torch.zeros(len(hidden), device=hidden.device)
    for begin in range(0, len(policy_head.weight), COLUMNS):
        ids = slice(begin, begin + COLUMNS)
        a, b = _logits(hidden, policy_head, ids) / temperature, _logits(other_hidden, other, ids) / temperature
        old, top = top, torch.maximum(top, a.amax(1))
        p, shrink = (a - top[:, None]).exp(), (old - top).exp()
        total, apart = total * shrink + p.sum(1), apart * shrink + (p * (a - b)).sum(1)
        old, other_top = other_top, torch.maximum(other_top, b.amax(1))
        other_total = other_total * (old - other_top).exp() + (b - other_top[:, None]).exp().sum(1)
    kl: Tensor = apart / total - (top + total.log()) + (other_top + other_total.log())
    return kl.clamp(min=0)


def _logits(hidden: Tensor, lm_head: Head, ids: slice) -> Tensor:  # [n, len(ids)] fp32
    x, weight = hidden.float(), lm_head.weight[ids].float()
    logits = x @ weight.T
    if lm_head.lora is not None:
        logits += lm_head.lora.scale * (x @ lm_head.lora.a.float().T) @ lm_head.lora.b[ids].float().T
    if lm_head.bias is not None:
        logits += lm_head.bias[ids].float()
    logits *= lm_head.scale
    return logits if lm_head.softcap is None else lm_head.softcap * torch.tanh(logits / lm_head.softcap)
