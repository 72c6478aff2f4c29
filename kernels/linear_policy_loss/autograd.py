"""Losses of the head whose gradients autograd makes, from all log-probs at once; and what a call has scored.

For losses of preference pairs, objectives of the whole batch and a vocabulary split over ranks, where every log-prob is
needed before any derivative is known. The backward forms the logits again for the rows that have a gradient
(`linear_logprob` does not with a frozen head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linear_logprob import HeadLora, linear_statistics
from ..policy_loss import PolicyLossOutput
from ..policy_loss.api import Metrics, finish, policy_loss_op
from .plan import HeadPlan
from .terms import AnyTerm, Term, TermsLossOutput, named, statistics_of, statistics_read


class CallHead(NamedTuple):
    """The head of a call, and what becomes of its gradient."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora: HeadLora | None
    softcap: float | None
    tp_group: Any
    weight_grad: Tensor | None  # [V, H]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weight, bias, and a and b of the adapter."""
        return self.weight, self.bias, *((None, None) if self.lora is None else self.lora[:2])


class CallRows(NamedTuple):
    """Rows of hidden states with their targets: the caller's, or those of a plan."""

    hidden: Tensor  # [R, H]
    temperature: Tensor  # [R]
    target: Tensor  # [P] int
    row: Tensor | None  # [P] int, row of each target; None: one a row, in order
    place: Tensor | None  # [P] int64, place of each target among the caller's; None: the same order
    M: int  # targets of the caller

    def planned(self, plan: HeadPlan) -> CallRows:
        """Return the rows and targets of a plan, made from the caller's; ``plan.start`` stands for ``row``."""
        hidden, temperature = self.hidden, self.temperature
        if plan.row is not None:
            hidden, temperature = hidden.index_select(0, plan.row), temperature[plan.row]
        target = self.target.long().contiguous() if plan.place is None else self.target.long()[plan.place]
        return CallRows(hidden, temperature, target, None, plan.place, plan.size[1])

    def by_caller(self, values: Tensor, absent: float) -> Tensor:
        """Return values of the targets ``[P, ...]`` in the caller's order ``[M, ...]``; ``absent`` for the others."""
        if self.place is None:
            return values
        return values.new_full((self.M, *values.shape[1:]), absent).index_copy(0, self.place, values)


def by_autograd(rows: CallRows, head: CallHead, terms: Sequence[AnyTerm]) -> TermsLossOutput:
    """Compute the terms from one `linear_statistics`, and leave the gradients to autograd."""
    names, ids = statistics_read(terms)
    if ids is not None and rows.place is not None:
        ids = ids[rows.place]
    of_targets = linear_statistics(
        rows.hidden, head.weight, rows.target, row=rows.row, want=("entropy", *names), extra_ids=ids, bias=head.bias,
        temperature=rows.temperature, softcap=head.softcap, lora=head.lora, weight_grad=head.weight_grad,
        tp_group=head.tp_group,
    )  # fmt: skip
    scores = [rows.by_caller(of_targets[name].detach(), torch.nan) for name in ("logprob", "entropy")]
    statistics = {name: rows.by_caller(values, 0) for name, values in of_targets.items()}
    scored = None
    if rows.place is not None:
        scored = torch.zeros(rows.M, dtype=torch.bool, device=rows.place.device).index_fill_(0, rows.place, True)
    logprob, entropy = statistics["logprob"], statistics["entropy"]
    loss: Tensor | None = None
    metrics: Metrics = {}
    losses = {}
    for t, of_term in statistics_of(terms, statistics):
        if isinstance(t, Term):
            # detached unless needed: even a gradient of zeros by the entropy would be computed
            term_entropy = entropy if t.objective.needs_entropy else entropy.detach()
            mask = scored if t.fields.mask is None or scored is None else scored & t.fields.mask
            fields = t.fields if mask is None else replace(t.fields, mask=mask)
            total, _, _, sums = policy_loss_op(logprob, term_entropy, *fields.tensors(), t.objective.encoded)
            value = finish(total, sums, t.normalizer, t.fields, t.objective, has_entropy=True)
        else:
            value = t.loss(logprob, **of_term)
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
    return TermsLossOutput(loss, metrics, losses, *scores)
