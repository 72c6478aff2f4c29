"""The terms on one `linear_logprob`, left to autograd: all log-probs first, then the losses, then the gradients.

For what must have seen everything before any derivative is known: losses of preference pairs, objectives of the whole
batch, a vocabulary split over ranks. The backward forms the logits again (`linear_logprob` does not with a frozen head)
for the rows that have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..linear_logprob import linear_logprob
from ..policy_loss.api import Metrics, PolicyLossOutput, finish, policy_loss_op
from .terms import AnyTerm, Term, TermsLossOutput, named


def composed(
    hidden: Tensor,  # [R, H]
    weight: Tensor,  # [V, H]
    target: Tensor,  # [P] int
    terms: Sequence[AnyTerm],  # on M targets
    *,
    M: int,
    place: Tensor | None,  # [P] int64: of each target in the terms; None: the same order
    row: Tensor | None,  # [P] int
    **options: Any,
) -> TermsLossOutput:
    """As `linear_terms_loss`; ``options`` are those of `linear_logprob`."""
    out = linear_logprob(hidden, weight, target, row=row, want=("entropy",), **options)
    assert out.entropy is not None
    entropy = out.entropy if row is None else out.entropy[row]
    logprob, scored = out.logprob, None
    known = [t.detach() for t in (logprob, entropy)]
    if place is not None:
        known = [t.new_full((M,), torch.nan).index_copy(0, place, t) for t in known]
        logprob, entropy = (t.new_zeros(M).index_copy(0, place, t) for t in (logprob, entropy))
        scored = torch.zeros(M, dtype=torch.bool, device=place.device).index_fill_(0, place, True)
    loss: Tensor | None = None
    metrics: Metrics = {}
    losses = {}
    for t in terms:
        if isinstance(t, Term):
            # a gradient of zeros by the entropy would still have to be formed
            of_entropy = entropy if t.objective.needs_entropy else entropy.detach()
            mask = scored if t.fields.mask is None or scored is None else scored & t.fields.mask
            fields = t.fields if mask is None else replace(t.fields, mask=mask)
            total, _, _, sums = policy_loss_op(logprob, of_entropy, *fields.tensors(), t.objective.encoded)
            value = finish(total, sums, t.normalizer, t.fields, t.objective, has_entropy=True)
        else:
            value = t.loss(logprob)
            if not isinstance(value, PolicyLossOutput) or value.loss.shape != ():
                raise TypeError(
                    f"linear_policy_loss: the loss of term '{t.name}' must return a PolicyLossOutput whose loss is a "
                    f"single number, got a {type(value).__name__}."
                )
        losses[t.name] = value.loss.detach()
        metrics |= named(value.metrics, t.name)
        weighted = value.loss if t.weight == 1 else value.loss * t.weight
        loss = weighted if loss is None else loss + weighted
    assert loss is not None
    return TermsLossOutput(loss, metrics, losses, *known)
