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

    def score(self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float) -> None:
        other, device, was_training = self._reference.model, self.model.device, self.model.training
        self.model.eval()
        with torch.no_grad():
            hidden, its = [target_hidden(self.model, batch.to(device)).cpu() for batch in batches], _kept(self.model)
            with self._reference.computing():
                for mine, waiting in zip(hidden, batches, strict=True):
                    own = to_device(waiting.temperatures(temperature), device)
                    theirs = target_hidden(other, waiting.without_routes().to(device))
                    found = divergence(mine.to(device), its, theirs, head(other), own)
                    write_column(trees, waiting, self.column, found)
        self.model.train(was_training)


def _kept(model: PreTrainedModel) -> Head:
    """Return the head of ``model`` with its present weights, also while others take their place."""
    found = head(model)
    lora = found.lora
    return found._replace(
        weight=found.weight.detach(),
        bias=None if found.bias is None else found.bias.detach(),
        lora=None if lora is None else lora._replace(a=lora.a.detach(), b=lora.b.detach()),
    )


def divergence(
    hidden: Tensor,  # [M, H]
    its: Head,
    other_hidden: Tensor,  # [M, H]
    other: Head,
    temperature: float | Tensor,  # one for all, or [M]
) -> Tensor:
    """Return ``KL(p || q)`` ``[M]`` fp32 (nats), p of ``its`` head and q of the ``other``, without gradient.

    Equal heads and hidden states give exactly 0. The logits are computed in fp32, in blocks of at most `ROWS` x
    `COLUMNS`; each is read once.
    """
    found = hidden.new_empty(len(hidden), dtype=torch.float32)
    for begin in range(0, len(hidden), ROWS):
        rows = slice(begin, begin + ROWS)
        own = temperature[rows, None] if isinstance(temperature, Tensor) else temperature
        found[rows] = _of_rows(hidden[rows], its, other_hidden[rows], other, own)
    return found


def _of_rows(hidden: Tensor, its: Head, other_hidden: Tensor, other: Head, temperature: float | Tensor) -> Tensor:
    """Return ``sum_v p_v (a_v - b_v) - lse(a) + lse(b)`` of rows' logits a and b."""
    top = other_top = torch.full((len(hidden),), -torch.inf, device=hidden.device)
    total = other_total = apart = torch.zeros(len(hidden), device=hidden.device)
    for begin in range(0, len(its.weight), COLUMNS):
        ids = slice(begin, begin + COLUMNS)
        a, b = _logits(hidden, its, ids) / temperature, _logits(other_hidden, other, ids) / temperature
        old, top = top, torch.maximum(top, a.amax(1))
        p, shrink = (a - top[:, None]).exp(), (old - top).exp()
        total, apart = total * shrink + p.sum(1), apart * shrink + (p * (a - b)).sum(1)
        old, other_top = other_top, torch.maximum(other_top, b.amax(1))
        other_total = other_total * (old - other_top).exp() + (b - other_top[:, None]).exp().sum(1)
    found: Tensor = apart / total - (top + total.log()) + (other_top + other_total.log())
    return found.clamp(min=0)


def _logits(hidden: Tensor, its: Head, ids: slice) -> Tensor:  # [n, len(ids)] fp32
    x, weight = hidden.float(), its.weight[ids].float()
    found = x @ weight.T
    if its.lora is not None:
        found += its.lora.scale * (x @ its.lora.a.float().T) @ its.lora.b[ids].float().T
    if its.bias is not None:
        found += its.bias[ids].float()
    found *= its.scale
    return found if its.softcap is None else its.softcap * torch.tanh(found / its.softcap)
