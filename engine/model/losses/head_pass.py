"""Terms of the pass over the head of a batch: which go together in one, its plan, and the terms of a piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from rolltree.kernels import HeadPlan, LogprobTerm, Term, plan_terms_loss

from ...batches.batch import TreeBatch
from ...batches.pieces import Piece
from ..sharding import shards_of, whole_shape
from .distillation import AnyTerm, Distilled


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
    V, H = whole_shape(layer.weight)
    split = shards_of(layer.weight) is not None
    of_head = (layer.weight, getattr(layer, "bias", None))
    frozen = not any(t is not None and t.requires_grad for t in of_head)

    def planned(terms: Sequence[Term | LogprobTerm], **rows: Any) -> HeadPlan:
        plan = plan_terms_loss(
            terms,
            vocabulary=V,
            hidden_size=H,
            device=model.device,
            frozen=frozen,
            gradient_share=gradient_share,
            **rows,
        )
        return replace(plan, schedule="two_phase") if split else plan

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
