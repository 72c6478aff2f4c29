"""The KL divergence of the policy's distributions from a reference's, over the vocabulary, as a column of trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import linear_divergence

from ..batches.batch import TreeBatch
from ..batches.device import to_device
from ..data.statistics import DIVERGENCE
from ..data.tree import TokenTree
from .decoder import target_hidden
from .head import Head, head
from .roles import Role, write_column

RESOLUTION = 1e-10
"""The divergence (nats) below which rounding of fp32 logits may be all that two distributions differ by."""


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
                head(self.model).frozen(),
            )
            with self._reference.computing():
                for policy_hidden, waiting in zip(hidden, batches, strict=True):
                    temperatures = to_device(waiting.temperatures(temperature), device)
                    other_hidden = target_hidden(other, waiting.without_routes().to(device))
                    kl = divergence(
                        policy_hidden.to(device), policy_head, other_hidden, head(other).frozen(), temperatures
                    )
                    write_column(trees, waiting, self.column, kl)
        self.model.train(was_training)
        return [self.model, other]


def divergence(
    hidden: Tensor,  # [M, H]
    policy_head: Head,
    other_hidden: Tensor,  # [M, H]
    other: Head,
    temperature: float | Tensor,  # one for all, or [M]
) -> Tensor:
    """Return ``KL(p || q)`` ``[M]`` fp32 (nats), p of ``policy_head`` and q of ``other``, without gradient.

    Neither head has an adapter (`Head.frozen`). What is below `RESOLUTION` is 0, as that of equal distributions.
    """
    compared = linear_divergence(
        hidden,
        policy_head.weight,
        other_hidden,
        other.weight,
        kind="reverse_kl",
        teacher_bias=other.bias,
        teacher_softcap=other.softcap,
        teacher_temperature=temperature / other.scale,
        **policy_head.options(temperature),
    )
    kl = compared.divergence
    return torch.where(kl < RESOLUTION, 0, kl)
