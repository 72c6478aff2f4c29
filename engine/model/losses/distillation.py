"""Distillation of whole distributions on trees: a teacher's hidden states of a batch, and the divergence of the heads.

The teacher computes the rows that the policy computes, so a prefix that responses share is computed once by either. A
row that predicts several targets is compared once, with the sum of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import LogprobTerm, Term, TermsLossOutput, linear_divergence

from ...batches.batch import TreeBatch
from ...batches.pack import pack
from ..decoder import target_hidden
from ..head import head
from ..roles import Role

TEACHER_PROMPT = "teacher_prompt"
"""Key of a tree's metadata: the token ids that the teacher reads in place of the prompt."""


class Seen(NamedTuple):
    """The values of a teacher that the divergence reads."""

    hidden: Tensor  # [M, H_t], the state that predicts each target of the batch
    weight: Tensor  # [V, H_t]
    bias: Tensor | None  # [V]
    softcap: float | None
    scale: float  # of the logits


class Distilled(NamedTuple):
    """A loss term: ``weight`` times the mean divergence of the policy from a teacher, on the targets of a batch."""

    teacher: Callable[[TreeBatch], Seen]
    weights: Tensor  # [M] float32, of each row at the first of its targets, and 0 at the others
    options: dict[str, Any]  # kind, beta, alpha
    normalizer: float
    weight: float = 1.0
    name: str = "actor"
    seen: Seen | None = None

    def take(self, target: Tensor) -> Distilled:
        """Return the term of some targets of the batch."""
        assert self.seen is not None
        seen = self.seen._replace(hidden=self.seen.hidden[target])
        return self._replace(weights=self.weights[target], seen=seen)


AnyTerm = Term | LogprobTerm | Distilled


def at_first_targets(weights: Tensor, head_index: Tensor) -> Tensor:
    """Return ``weights [M]`` summed over the targets of each row, at the first of them.

    Args:
        head_index: ``[M]``, the row of each target.
    """
    rows = int(head_index.max()) + 1 if len(head_index) else 0
    sums = weights.new_zeros(rows, dtype=torch.float64).index_add_(0, head_index, weights.double())
    places = torch.arange(len(head_index), device=head_index.device)
    first = torch.full((rows,), len(head_index), device=head_index.device)
    first = first.scatter_reduce(0, head_index, places, "amin")
    return torch.zeros_like(weights).index_copy_(0, first, sums.to(weights.dtype))


def _hidden(model: PreTrainedModel, batch: TreeBatch) -> Tensor:  # [M, H_t]
    """Return the state that predicts each target of ``batch``, after the prompts that the teacher reads."""
    prompts = [tree.meta.get(TEACHER_PROMPT) for tree in batch.trees]
    if all(prompt is None for prompt in prompts):
        return target_hidden(model, batch)
    trees = [t if p is None else t.reroot(p) for t, p in zip(batch.trees, prompts, strict=True)]
    counts = [tree.num_tokens - tree.prompt_length for tree in trees]
    most = max((p.end - p.begin for p in batch.pieces), default=sum(int(t.path_length.sum()) for t in trees))
    parts: dict[int, Tensor] = {}
    for other in pack(trees, max_tokens=most, in_pieces=bool(batch.pieces), flat=batch.padded is not None):
        hidden = target_hidden(model, other.to(batch.target.device))
        parts |= zip(other.tree_index, hidden.split([counts[i] for i in other.tree_index]), strict=True)
    return torch.cat([parts[i] for i in range(len(trees))])


def see(role: Role, batch: TreeBatch) -> Seen:
    """Return what the divergence reads of ``role`` on ``batch``, without gradients.

    A role that computes with the policy's module and other weights is seen before the policy's own forward.
    """
    model = role.model
    was_training = model.training
    model.eval()
    with torch.no_grad(), role.computing():
        hidden = _hidden(model, batch.without_routes())
        of_role = head(model)
        # detached: those of a policy, in whose place they stand for now
        weight, bias = of_role.weight.detach(), None if of_role.bias is None else of_role.bias.detach()
        if of_role.lora is not None:
            weight = torch.addmm(weight, of_role.lora.b, of_role.lora.a, alpha=of_role.lora.scale)
    model.train(was_training)
    return Seen(hidden, weight, bias, of_role.softcap, of_role.scale)


def with_teachers(batch: TreeBatch, terms: Sequence[AnyTerm]) -> list[AnyTerm]:
    """Return ``terms`` with what their teachers show of ``batch``; a teacher of several terms is asked once."""
    shown: dict[int, Seen] = {}
    seen: list[AnyTerm] = []
    for term in terms:
        if isinstance(term, Distilled):
            key = id(term.teacher)
            shown[key] = shown[key] if key in shown else term.teacher(batch)
            term = term._replace(seen=shown[key])
        seen.append(term)
    return seen


def add_divergence(
    out: TermsLossOutput,
    term: Distilled,
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    row: Tensor,  # [M]
    scale: float,
    options: dict[str, Any],
) -> TermsLossOutput:
    """Return ``out`` with the loss and the metrics of ``term``.

    Args:
        weight: the policy's head.
        row: of hidden, for each target.
        scale: the factor of the policy's logits.
        options: of its head; the temperature is divided by ``scale``.
    """
    assert term.seen is not None
    seen, of_pairs, temperature = term.seen, term.weights, options["temperature"]
    at = temperature[row] if isinstance(temperature, Tensor) else temperature
    compared = linear_divergence(
        hidden,
        weight,
        seen.hidden,
        seen.weight,
        row=row,
        weights=term.weight * of_pairs,
        normalizer=term.normalizer,
        teacher_bias=seen.bias,
        teacher_softcap=seen.softcap,
        teacher_temperature=at * scale / seen.scale,
        **term.options,
        **options,
    )
    count = of_pairs.double().sum()
    metrics = {
        f"{term.name}/{name}": (torch.where(of_pairs != 0, values.double() * of_pairs, 0).sum(), count)
        for name, values in compared._asdict().items()
        if name != "loss"
    }
    losses = {term.name: metrics[f"{term.name}/divergence"][0] / term.normalizer}
    return out._replace(loss=out.loss + compared.loss, metrics=out.metrics | metrics, losses=out.losses | losses)
