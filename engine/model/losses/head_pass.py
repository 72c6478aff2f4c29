"""The pass over the head of a batch: loss terms of log-probs in one, and those that compare whole distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import HeadPlan, LogprobTerm, Term, TermsLossOutput, linear_terms_loss, plan_terms_loss

from ...batches.batch import TreeBatch
from ...batches.pieces import Piece
from ..head import head, row_temperature
from .distillation import AnyTerm, Distilled, add_divergence


def head_pass(
    model: PreTrainedModel,
    hidden: Tensor,  # [N, H]
    target: Tensor,  # [M]
    terms: Sequence[AnyTerm],
    row: Tensor,  # [M]
    temperature: float | Tensor,  # or [M]
    plan: HeadPlan | None,
    head_grad: Tensor | None,
) -> TermsLossOutput:
    """Return the sum of ``terms``, with gradients to hidden and head; that of the weight goes to ``head_grad`` where it
    is given."""
    lm_head = head(model)
    weight = lm_head.weight
    options: dict[str, Any] = lm_head.options(row_temperature(temperature, row, len(hidden)))
    if head_grad is not None:
        options |= {"weight_grad": head_grad, "in_forward": True}
        weight = weight if weight.is_leaf else weight.detach().requires_grad_()  # gathered: nothing flows to the shards
    out = TermsLossOutput(hidden.new_zeros((), dtype=torch.float32), {}, {})
    if of_logprobs := of_kernels(terms):
        out = linear_terms_loss(hidden, weight, target, of_logprobs, row=row, plan=plan, **options)
    for term in terms:
        if isinstance(term, Distilled):
            out = add_divergence(out, term, hidden, weight, row, lm_head.scale, options)
    return out


def of_kernels(terms: Sequence[AnyTerm]) -> list[Term | LogprobTerm]:
    """Return the terms that one pass computes from log-probs."""
    return [term for term in terms if not isinstance(term, Distilled)]


def of_tokens(terms: Sequence[AnyTerm]) -> list[Term | Distilled] | None:
    """Return the terms if each is a sum over single targets, else None."""
    single: list[Term | Distilled] = []
    for term in terms:
        if isinstance(term, LogprobTerm) or (isinstance(term, Term) and term.objective.scope != "token"):
            return None
        single.append(term)
    return single


def taken(terms: Sequence[Term | Distilled], piece: Piece) -> list[Term | Distilled]:
    """Return the terms restricted to the piece's targets."""
    return [
        t.take(piece.target) if isinstance(t, Distilled) else t._replace(fields=t.fields.take(piece.target))
        for t in terms
    ]


def with_plan(
    model: PreTrainedModel,
    batch: TreeBatch,
    terms: Sequence[AnyTerm],
    *,
    gradient_share: float = 1.0,
    by_target: bool = False,
) -> TreeBatch:
    """Return ``batch`` with the plan of its head pass, or of each piece's head pass.

    Planning reads the data, so it should run while ``batch`` and ``terms`` are in the host's memory: then neither the
    planning nor the head pass on the device needs a synchronisation.

    Args:
        gradient_share: as for `plan_terms_loss`.
        by_target: the head pass will get a temperature for each target.
    """
    layer = model.get_output_embeddings()
    V, H = layer.weight.shape
    of_head = (layer.weight, getattr(layer, "bias", None))
    planned = partial(
        plan_terms_loss,
        vocabulary=V,
        hidden_size=H,
        device=model.device,
        frozen=not any(t is not None and t.requires_grad for t in of_head),
        gradient_share=gradient_share,
    )
    of_logprobs = of_kernels(terms)
    if not of_logprobs:
        return batch
    if not batch.pieces:
        rows, row = (len(batch.head_row), batch.head_index) if by_target else (batch.num_tokens, batch.row)
        return replace(batch, plan=planned(of_logprobs, num_rows=rows, row=row))
    single = of_tokens(of_logprobs)
    if single is None:
        return batch
    pieces = [
        replace(p, plan=planned(of_kernels(taken(single, p)), num_rows=len(p.head_row), row=p.head_index))
        for p in batch.pieces
    ]
    return replace(batch, pieces=tuple(pieces))
