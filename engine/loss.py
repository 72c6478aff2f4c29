"""Loss and gradients of a batch: at once, or in pieces where its tree is larger than the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import Objective, PolicyFields, PolicyLossOutput, linear_policy_loss, policy_loss

from .batch import TreeBatch
from .model import batch_logprob, batch_loss, head, hidden_states, pair_logprob
from .pieces import PieceStore, depth_first

Metrics = dict[str, tuple[Tensor, Tensor]]


def backward(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    *,
    normalizer: float | Tensor,
    temperature: float = 1.0,
    old_logprob: Tensor | None = None,  # [M]
    ref_logprob: Tensor | None = None,  # [M]
    after_each: Callable[[], object] | None = None,
) -> PolicyLossOutput:
    """:func:`batch_loss` and its backward: adds to the gradients of the model's parameters.

    A batch of pieces gives the same loss and gradients, with the activations of one piece in memory. Where the
    objective looks at whole paths (ratios of sequences, say) it needs every log-prob before the first gradient, so the
    model runs once more.

    Args:
        normalizer, temperature, old_logprob, ref_logprob: as for :func:`batch_loss`.
        after_each: called after every backward, as to move gradients away.

    Returns:
        Loss and metrics, without gradient.
    """
    after = after_each or (lambda: None)
    if not batch.pieces:
        out = batch_loss(
            model,
            batch,
            objective,
            normalizer=normalizer,
            temperature=temperature,
            old_logprob=old_logprob,
            ref_logprob=ref_logprob,
        )
        out.loss.backward()
        after()
        return out._replace(loss=out.loss.detach())
    fields = batch.fields(objective, old_logprob=old_logprob, ref_logprob=ref_logprob)
    if objective.scope == "token":
        return _token_by_token(model, batch, objective, fields, normalizer, temperature, after)
    return _in_two_passes(model, batch, objective, fields, normalizer, temperature, after)


def _token_by_token(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    fields: PolicyFields,
    normalizer: float | Tensor,
    temperature: float,
    after: Callable[[], object],
) -> PolicyLossOutput:
    weight, bias, softcap = head(model)
    total = torch.zeros((), dtype=torch.float64, device=batch.input_ids.device)
    metrics: Metrics = {}

    def use(store: PieceStore, hidden: Tensor) -> None:
        p = store.piece
        out = linear_policy_loss(
            hidden.index_select(0, p.head_row),
            weight,
            batch.target[p.pair],
            fields.take(p.pair),
            objective,
            normalizer=normalizer,
            row=p.head_index,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
        )
        out.loss.backward()
        after()
        total.add_(out.loss.detach())
        for name, (value, count) in out.metrics.items():
            before = metrics.get(name, (torch.zeros_like(value), torch.zeros_like(count)))
            metrics[name] = (before[0] + value, before[1] + count)

    _visit(model, batch, use)
    return PolicyLossOutput(total.float(), metrics)


def _in_two_passes(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    fields: PolicyFields,
    normalizer: float | Tensor,
    temperature: float,
    after: Callable[[], object],
) -> PolicyLossOutput:
    """Log-probs first; the loss's derivatives by them are then the weights of a linear objective."""
    known = batch_logprob(model, batch, temperature=temperature, want=("entropy",))
    assert known.entropy is not None
    logprob, entropy = known.logprob.requires_grad_(), known.entropy.requires_grad_(objective.needs_entropy)
    with torch.enable_grad():
        out = policy_loss(logprob, fields, objective, normalizer=normalizer, entropy=entropy)
    by_logprob, *by_entropy = torch.autograd.grad(out.loss, [t for t in (logprob, entropy) if t.requires_grad])
    want = ("entropy",) if by_entropy else ()

    def use(store: PieceStore, hidden: Tensor) -> None:
        p = store.piece
        now = pair_logprob(model, hidden, batch.target[p.pair], p.head_row, p.head_index, temperature, want)
        linear = (now.logprob * by_logprob[p.pair]).sum()
        if now.entropy is not None:
            linear = linear + (now.entropy * by_entropy[0][p.pair]).sum()
        linear.backward()
        after()

    _visit(model, batch, use)
    return out._replace(loss=out.loss.detach())


def _visit(model: PreTrainedModel, batch: TreeBatch, use: Callable[[PieceStore, Tensor], None]) -> None:
    (tree,) = batch.trees
    depth_first(
        tree, batch.pieces, batch.input_ids.device, run=partial(hidden_states, model, batch), use=use, gradients=True
    )
