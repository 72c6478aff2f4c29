"""Loss and gradients of a batch: at once, or in pieces if its tree is larger than the budget.

A loss is a sum of terms over the same targets (`_head_pass`), which share one forward of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import (
    HeadPlan,
    Objective,
    PolicyLossOutput,
    Term,
    TermsLossOutput,
    linear_terms_loss,
    policy_loss,
)
from rolltree.kernels.checks import Arguments
from rolltree.kernels.linear_policy_loss.terms import named, statistics_of, statistics_read

from ..batches.batch import OldLogprob, TreeBatch
from ..batches.pieces import Piece, PieceStore, depth_first
from .decoder import Decoded, decode, encode_pictures, statistics_of_pieces
from .head import head, row_temperature, target_statistics
from .logprob import check_call, check_temperature
from .losses.distillation import AnyTerm, Distilled, add_divergence, with_teachers
from .losses.head_pass import of_kernels, of_tokens, taken
from .pictures import Features

Metrics = dict[str, tuple[Tensor, Tensor]]


def batch_loss(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    *,
    normalizer: float | Tensor,
    temperature: float | Tensor = 1.0,  # or [M]
    old_logprob: OldLogprob = "behaviour",  # [M]
    ref_logprob: Tensor | None = None,  # [M]
    router_share: float = 1.0,
) -> PolicyLossOutput:
    """Return the objective's loss over all leaves of ``batch``, exact for shared tokens, ready for ``.backward()``.

    Args:
        normalizer: divides the sum over logical tokens; see ``Objective.aggregation``. Give the count of the whole
            update, so that the loss does not depend on how the update is split into micro-batches.
        temperature: divides the logits of the distribution whose log-probs enter the ratio; one for all, or one a
            target (`TreeBatch.temperatures`).
        old_logprob: log-probs in the denominator of the ratio: a tensor, those recorded by the sampler ("behaviour"),
            the column ``proximal_logprob`` ("proximal"), or None for a single on-policy update (ratio 1).
        ref_logprob: log-probs of the reference policy, for objectives with a KL term; the batch's column by default.
        router_share: weight of the experts' load balancing loss, if the model's config enables it; the shares of an
            update's batches should sum to 1. That loss is a mean over the tokens of one batch, so unlike the rest it
            depends on how an update is split.

    Returns:
        The loss ``[]`` and metrics as sums and counts.

    Raises:
        ValueError: ``old_logprob`` names a column that lacks a token in the loss and the objective has a ratio; or an
            argument has a wrong shape, dtype or value.
        TypeError: an argument is of another type.
    """
    check_call("batch_loss", model, batch)
    check_temperature("batch_loss", batch, temperature)
    check = Arguments("batch_loss", "batch.input_ids", batch.input_ids)
    if not isinstance(objective, Objective):
        check.wrong_type("objective", "an Objective", objective)
    check.number("router_share", router_share)
    fields = batch.fields(objective, old_logprob=old_logprob, ref_logprob=ref_logprob)
    out = terms_loss(model, batch, [Term(fields, objective, normalizer)], temperature, router_share)
    return PolicyLossOutput(out.loss, out.metrics)


def terms_loss(
    model: PreTrainedModel,
    batch: TreeBatch,
    terms: Sequence[AnyTerm],
    temperature: float | Tensor,  # or [M]
    router_share: float,
    head_grad: Tensor | None = None,
) -> TermsLossOutput:
    """Return the sum of ``terms`` over ``batch``, ready for ``.backward()``.

    With ``head_grad [V, H]`` fp32, the gradient of the head's weight is added to it during this forward.
    """
    decoded = decode(model, batch)
    hidden, row = decoded.hidden, batch.row
    if isinstance(temperature, Tensor):  # targets of one row may have been sampled at several
        hidden, row = hidden.index_select(0, batch.head_row), batch.head_index
    out = _head_pass(model, hidden, batch.target, terms, row, temperature, batch.plan, head_grad)
    return with_router_loss(out, decoded, router_share)


def _head_pass(
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


def with_router_loss(out: TermsLossOutput, decoded: Decoded, share: float) -> TermsLossOutput:
    """Add ``share`` times the experts' load balancing loss to ``out``, if there is one."""
    if decoded.router_loss is None:
        return out
    counted = torch.full((), share, dtype=torch.float64, device=out.loss.device)
    metric = {"actor/router_loss": (decoded.router_loss.detach() * counted, counted)}
    return out._replace(loss=out.loss + share * decoded.router_loss, metrics=out.metrics | metric)


def backward(
    model: PreTrainedModel,
    batch: TreeBatch,
    terms: Sequence[AnyTerm],
    *,
    temperature: float | Tensor = 1.0,  # or [M]
    router_share: float = 1.0,
    after_each: Callable[[], object] | None = None,
    head_grad: Callable[[], Tensor | None] | None = None,
) -> TermsLossOutput:
    """Compute the loss of ``terms`` and add its gradients to those of the model's parameters.

    A batch in pieces gives the same loss and gradients, with the activations of one piece in memory at a time. A term
    that depends on whole paths (sequence-level ratios, preference pairs) needs every log-prob before the first
    gradient, so the model runs once more.

    Args:
        terms: on the batch's targets; see `linear_terms_loss`.
        temperature, router_share: as for :func:`batch_loss`.
        after_each: called after every backward, for example to move gradients away.
        head_grad: called before every pass of the head; returns an fp32 tensor ``[V, H]`` to which the gradient of the
            head's weight is added instead of to ``weight.grad``, or None.

    Returns:
        Loss ``[]`` and metrics, without gradient.

    Raises:
        ValueError: the model was not loaded with ``attn_implementation="rolltree"``, or a term does not fit the batch.
    """
    check_call("backward", model, batch)
    terms = with_teachers(batch, terms)
    after, into = after_each or (lambda: None), head_grad or (lambda: None)
    if not batch.pieces:
        out = terms_loss(model, batch, terms, temperature, router_share, into())
        if out.loss.requires_grad:
            out.loss.backward()
        after()
        return out._replace(loss=out.loss.detach())
    if (single := of_tokens(terms)) is not None:
        return _token_by_token(model, batch, single, temperature, router_share, after, into)
    return _in_two_passes(model, batch, terms, temperature, router_share, after)


def _own(temperature: float | Tensor, piece: Piece) -> float | Tensor:
    """Return the temperature of the piece's targets."""
    return temperature[piece.target] if isinstance(temperature, Tensor) else temperature


class _Account:
    """Adds up loss and metrics over pieces."""

    def __init__(self) -> None:
        self.loss: float | Tensor = 0.0
        self.metrics: Metrics = {}
        self.losses: dict[str, Tensor] = {}

    def add(self, out: TermsLossOutput) -> None:
        self.loss = self.loss + out.loss.detach()
        for name, values in out.metrics.items():
            before = self.metrics.get(name)
            self.metrics[name] = values if before is None else (before[0] + values[0], before[1] + values[1])
        for name, value in out.losses.items():
            self.losses[name] = self.losses[name] + value if name in self.losses else value

    def result(self) -> TermsLossOutput:
        assert isinstance(self.loss, Tensor)
        return TermsLossOutput(self.loss, self.metrics, self.losses)


def _token_by_token(
    model: PreTrainedModel,
    batch: TreeBatch,
    terms: Sequence[Term | Distilled],
    temperature: float | Tensor,  # or [M]
    router_share: float,
    after: Callable[[], object],
    into: Callable[[], Tensor | None],
) -> TermsLossOutput:
    account = _Account()

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        hidden, target = decoded.hidden.index_select(0, p.head_row), batch.target[p.target]
        piece_temperature = _own(temperature, p)
        out = _head_pass(model, hidden, target, taken(terms, p), p.head_index, piece_temperature, p.plan, into())
        out = with_router_loss(out, decoded, router_share * (p.end - p.begin) / batch.num_tokens)
        out.loss.backward()
        after()
        account.add(out)

    _visit(model, batch, use)
    return account.result()


def _in_two_passes(
    model: PreTrainedModel,
    batch: TreeBatch,
    terms: Sequence[AnyTerm],
    temperature: float | Tensor,  # or [M]
    router_share: float,
    after: Callable[[], object],
) -> TermsLossOutput:
    """Compute all log-probs and statistics first; the loss's derivatives with respect to them then weigh a linear
    objective, piece by piece."""
    compared = [term for term in terms if isinstance(term, Distilled)]
    of_logprobs = of_kernels(terms)
    want, extra_ids = statistics_read(of_logprobs)
    computed = statistics_of_pieces(model, batch, temperature, ("entropy", *want), extra_ids)
    of_entropy = "entropy" in want or any(isinstance(t, Term) and t.objective.needs_entropy for t in of_logprobs)
    for name, values in computed.items():
        values.requires_grad_(name != "entropy" or of_entropy)
    logprob, entropy = computed["logprob"], computed["entropy"]
    with torch.enable_grad():
        loss, losses = 0.0 * logprob.sum(), {}
        metrics: Metrics = {}
        for term, statistics in statistics_of(of_logprobs, computed):
            if isinstance(term, Term):
                out = policy_loss(logprob, term.fields, term.objective, normalizer=term.normalizer, entropy=entropy)
            else:
                out = term.loss(torch.where(term.mask, logprob, 0), **statistics)
            loss = loss + term.weight * out.loss
            metrics |= named(out.metrics, term.name)
            losses[term.name] = out.loss.detach()
    needed = {name: values for name, values in computed.items() if values.requires_grad}
    slopes = torch.autograd.grad(loss, list(needed.values()), allow_unused=True)
    derivatives = {name: d for name, d in zip(needed, slopes, strict=True) if d is not None}
    account = _Account()
    account.add(TermsLossOutput(loss, metrics, losses))

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        target, piece_temperature = batch.target[p.target], _own(temperature, p)
        ids = None if extra_ids is None else extra_ids[p.target]
        again = [name for name in derivatives if name != "logprob"]
        now = target_statistics(model, decoded.hidden, target, p.head_row, p.head_index, piece_temperature, again, ids)
        linear = sum(((now[name] * d[p.target]).sum() for name, d in derivatives.items()), logprob.new_zeros(()))
        share = router_share * (p.end - p.begin) / batch.num_tokens
        hidden = decoded.hidden.index_select(0, p.head_row)
        of_teachers = taken(compared, p)
        out = _head_pass(model, hidden, target, of_teachers, p.head_index, piece_temperature, None, None)
        routed = with_router_loss(out._replace(loss=out.loss + linear), decoded, share)
        routed.loss.backward()
        after()
        account.add(routed._replace(loss=routed.loss - linear))

    _visit(model, batch, use)
    return account.result()


def _visit(model: PreTrainedModel, batch: TreeBatch, use: Callable[[PieceStore, Decoded], None]) -> None:
    (tree,) = batch.trees
    features = encode_pictures(model, batch)
    levels = [] if features is None else [features.embedding, *features.deeper]
    cut = [level.detach().requires_grad_(level.requires_grad) for level in levels]
    shared = Features(cut[0], tuple(cut[1:])) if cut else None
    run = partial(decode, model, batch, features=shared)
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=True)
    trained = [level for level, leaf in zip(levels, cut, strict=True) if leaf.grad is not None]
    if trained:  # the tower runs backward once, with the gradients of all pieces
        torch.autograd.backward(trained, [leaf.grad for leaf in cut if leaf.grad is not None])
