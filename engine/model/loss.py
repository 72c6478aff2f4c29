"""Loss and gradients of a batch: at once, or in pieces where its tree is larger than the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import Objective, PolicyFields, PolicyLossOutput, linear_policy_loss, policy_loss

from ..data.batch import TreeBatch
from ..data.pieces import PieceStore, depth_first
from .decoder import Decoded, batch_logprob, batch_loss, decode, head, pair_logprob, with_router_loss

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
    router_share: float = 1.0,
    after_each: Callable[[], object] | None = None,
) -> PolicyLossOutput:
    """:func:`batch_loss` and its backward: adds to the gradients of the model's parameters.

    A batch of pieces gives the same loss and gradients, with the activations of one piece in memory. Where the
    objective looks at whole paths (ratios of sequences, say) it needs every log-prob before the first gradient, so the
    model runs once more.

    Args:
        normalizer, temperature, old_logprob, ref_logprob, router_share: as for :func:`batch_loss`.
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
            router_share=router_share,
        )
        out.loss.backward()
        after()
        return out._replace(loss=out.loss.detach())
    fields = batch.fields(objective, old_logprob=old_logprob, ref_logprob=ref_logprob)
    if objective.scope == "token":
        return _token_by_token(model, batch, objective, fields, normalizer, temperature, router_share, after)
    return _in_two_passes(model, batch, objective, fields, normalizer, temperature, router_share, after)


class _Account:
    """Loss and metrics so far."""

    def __init__(self) -> None:
        self.loss: float | Tensor = 0.0
        self.metrics: Metrics = {}

    def add(self, loss: Tensor, metrics: Metrics) -> None:
        self.loss = self.loss + loss.detach()
        for name, values in metrics.items():
            before = self.metrics.get(name)
            self.metrics[name] = values if before is None else (before[0] + values[0], before[1] + values[1])

    def result(self) -> PolicyLossOutput:
        assert isinstance(self.loss, Tensor)
        return PolicyLossOutput(self.loss, self.metrics)


def _token_by_token(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    fields: PolicyFields,
    normalizer: float | Tensor,
    temperature: float,
    router_share: float,
    after: Callable[[], object],
) -> PolicyLossOutput:
    weight, bias, softcap = head(model)
    account = _Account()

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        out = linear_policy_loss(
            decoded.hidden.index_select(0, p.head_row),
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
        out = with_router_loss(out, decoded, router_share * (p.end - p.begin) / batch.num_tokens)
        out.loss.backward()
        after()
        account.add(*out)

    _visit(model, batch, use)
    return account.result()


def _in_two_passes(
    model: PreTrainedModel,
    batch: TreeBatch,
    objective: Objective,
    fields: PolicyFields,
    normalizer: float | Tensor,
    temperature: float,
    router_share: float,
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
    account = _Account()
    account.add(*out)

    def use(store: PieceStore, decoded: Decoded) -> None:
        p = store.piece
        now = pair_logprob(model, decoded.hidden, batch.target[p.pair], p.head_row, p.head_index, temperature, want)
        linear = (now.logprob * by_logprob[p.pair]).sum()
        if now.entropy is not None:
            linear = linear + (now.entropy * by_entropy[0][p.pair]).sum()
        share = router_share * (p.end - p.begin) / batch.num_tokens
        routed = with_router_loss(PolicyLossOutput(linear, {}), decoded, share)
        routed.loss.backward()
        after()
        account.add(routed.loss - linear, routed.metrics)

    _visit(model, batch, use)
    return account.result()


def _visit(model: PreTrainedModel, batch: TreeBatch, use: Callable[[PieceStore, Decoded], None]) -> None:
    (tree,) = batch.trees
    run = partial(decode, model, batch)
    depth_first(tree, batch.pieces, batch.input_ids.device, run=run, use=use, gradients=True)
