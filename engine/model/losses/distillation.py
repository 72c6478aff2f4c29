"""Distillation on trees: what a teacher shows of a batch, and the divergence of the policy from it.

A teacher in this process shows its hidden states; it computes the rows that the policy computes, so a prefix that
responses share is computed once by either. A teacher on a server has shown the log-probs of its likeliest tokens, in
columns of the trees. A row that predicts several targets is compared once, with the sum of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import (
    DivergenceOutput,
    LogprobTerm,
    Term,
    TermsLossOutput,
    linear_divergence,
    linear_topk_divergence,
)

from ...batches.batch import TreeBatch
from ...batches.cost import CostModel, Work
from ...data.columns import TOP_IDS, TOP_LOGPROBS
from ...data.tree import TokenTree
from ..decoder import target_hidden
from ..head import Head, head
from ..roles import Role
from ..teachers.repacked import of_trees

FLOP = "divergence_flop"
"""Key of the sum of the FLOP of teachers and of comparisons with them."""
TEACHER_PROMPT = "teacher_prompt"
"""Key of a tree's metadata: the token ids that the teacher reads in place of the prompt."""


class Whole(NamedTuple):
    """The values of a teacher in this process that the divergence reads."""

    hidden: Tensor  # [P, H_t], the state that predicts each target that the teacher teaches
    head: Head  # without an adapter
    target: Tensor | None  # [P] int64, those targets of the batch; None: all, P = M
    name: str = ""  # of one of several teachers
    flop: float = 0.0  # of the teacher's decoder

    def take(self, target: Tensor) -> Whole:
        """Return the values of some targets of a batch of one tree, all of whose targets it teaches."""
        return self._replace(
            hidden=self.hidden[target], target=None, flop=self.flop * len(target) / max(len(self.hidden), 1)
        )


class Likeliest(NamedTuple):
    """The values of a teacher on a server that the divergence reads."""

    ids: Tensor  # [P, K] int32, tokens whose log-probs are known; -1: none
    logprob: Tensor  # [P, K] float32
    target: Tensor | None  # [P], as in `Whole`
    name: str = ""
    flop: float = 0.0  # of this process

    def take(self, target: Tensor) -> Likeliest:
        """Return the values of some targets, as `Whole.take` does."""
        return self._replace(ids=self.ids[target], logprob=self.logprob[target], target=None)


Seen = Whole | Likeliest


class Distilled(NamedTuple):
    """A loss term: ``weight`` times the mean divergence of the policy from its teachers, on the targets of a batch."""

    teacher: Callable[[TreeBatch], list[Seen]]
    weights: Tensor  # [M] float32, of each row at the first of its targets, and 0 at the others
    options: dict[str, Any]  # kind, beta, alpha; and of a teacher on a server rest
    normalizer: float
    weight: float = 1.0
    name: str = "actor"
    seen: Sequence[Seen] = ()

    def take(self, target: Tensor) -> Distilled:
        """Return the term of some targets of a batch of one tree."""
        return self._replace(weights=self.weights[target], seen=[part.take(target) for part in self.seen])


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


def targets_of(batch: TreeBatch, chosen: Sequence[int]) -> Tensor | None:
    """Return the targets ``[P]`` of the chosen trees of ``batch``, in order; None: they are all."""
    if len(chosen) == len(batch.trees):
        return None
    bounds = [0]
    for tree in batch.trees:
        bounds.append(bounds[-1] + tree.num_tokens - tree.prompt_length)
    places = [torch.arange(0), *(torch.arange(bounds[i], bounds[i + 1]) for i in chosen)]
    return torch.cat(places).to(batch.target.device)


def _hidden(model: PreTrainedModel, batch: TreeBatch, chosen: Sequence[int]) -> tuple[Tensor, Work]:  # [P, H_t]
    """Return the state that predicts each target of the chosen trees, after the prompts that the teacher reads, and
    what the decoder has computed."""
    prompts = [batch.trees[i].meta.get(TEACHER_PROMPT) for i in chosen]
    if len(chosen) == len(batch.trees) and all(prompt is None for prompt in prompts):
        return target_hidden(model, batch), replace(Work.of([batch]), heads=0)
    work = Work()

    def compute(other: TreeBatch) -> Tensor:
        nonlocal work
        work += replace(Work.of([other]), heads=0)
        return target_hidden(model, other.to(batch.target.device))

    def read(tree: TokenTree, prompt: Sequence[int] | None) -> TokenTree:
        return tree if prompt is None else tree.reroot(prompt)

    trees = [read(batch.trees[i], prompt) for i, prompt in zip(chosen, prompts, strict=True)]
    values = of_trees(batch, trees, compute)
    return torch.cat(values) if values else torch.empty(0), work


def see(role: Role, batch: TreeBatch, chosen: Sequence[int], name: str = "") -> Whole:
    """Return what the divergence reads of ``role`` on the chosen trees of ``batch``, without gradients.

    A role that computes with the policy's module and other weights is seen before the policy's own forward.
    """
    model = role.model
    was_training = model.training
    model.eval()
    with torch.no_grad(), role.computing():
        hidden, work = _hidden(model, batch.without_routes(), chosen)
        of_role = head(model).frozen()
    model.train(was_training)
    return Whole(hidden, of_role, targets_of(batch, chosen), name, CostModel.of(model).forward(work))


def read_likeliest(batch: TreeBatch, chosen: Sequence[int], name: str = "") -> Likeliest:
    """Return what a teacher on a server has shown of the chosen trees of ``batch``."""
    target = targets_of(batch, chosen)
    ids, logprob = (batch.columns[column] for column in (TOP_IDS, TOP_LOGPROBS))
    if target is not None:
        ids, logprob = ids[target], logprob[target]
    return Likeliest(ids, logprob, target, name)


def with_teachers(batch: TreeBatch, terms: Sequence[AnyTerm]) -> list[AnyTerm]:
    """Return ``terms`` with what their teachers show of ``batch``; a teacher of several terms is asked once."""
    shown: dict[int, list[Seen]] = {}
    seen: list[AnyTerm] = []
    for term in terms:
        if isinstance(term, Distilled):
            key = id(term.teacher)
            again = key in shown
            shown[key] = shown[key] if again else term.teacher(batch)
            parts = shown[key]
            if again:  # its FLOP are the first term's
                parts = [part._replace(flop=0.0) for part in parts]
            term = term._replace(seen=parts)
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
    nothing = hidden.new_zeros((), dtype=torch.float64)
    loss, metrics = out.loss, {f"{term.name}/divergence": (nothing, nothing)}
    flop, _ = out.metrics.get(FLOP, (nothing, nothing))
    for seen in term.seen:
        pairs, weights = (v if seen.target is None else v[seen.target] for v in (row, term.weights))
        common = {"row": pairs, "weights": term.weight * weights, "normalizer": term.normalizer, **options}
        compared = _compare(seen, term.options, hidden, weight, scale, common)
        loss = loss + compared.loss
        flop = flop + seen.flop + (weights != 0).sum().double() * _products(seen, weight)
        count = weights.double().sum()
        for name, values in compared._asdict().items():
            if name == "loss" or values is None:
                continue
            total = torch.where(weights != 0, values.double() * weights, 0).sum()
            keys = [f"{term.name}/{name}"]
            if seen.name and name == "divergence":
                keys.append(f"{term.name}/{name}/{seen.name}")
            for key in keys:
                before = metrics.get(key, (0.0, 0.0))
                metrics[key] = before[0] + total, before[1] + count
    losses = {term.name: metrics[f"{term.name}/divergence"][0] / term.normalizer}
    all_metrics = out.metrics | metrics | {FLOP: (flop, nothing)}
    return out._replace(loss=loss, metrics=all_metrics, losses=out.losses | losses)


def _compare(
    seen: Seen, kind: dict[str, Any], hidden: Tensor, weight: Tensor, scale: float, common: dict[str, Any]
) -> DivergenceOutput:
    """Return the divergence of the policy's rows from what a teacher has shown; see `add_divergence`.

    Args:
        kind: options of the term.
        common: arguments of both ops.
    """
    if isinstance(seen, Likeliest):
        return linear_topk_divergence(hidden, weight, seen.ids, seen.logprob, **{"rest": True, **kind, **common})
    temperature = common["temperature"]
    at = temperature[common["row"]] if isinstance(temperature, Tensor) else temperature
    options = {name: value for name, value in kind.items() if name != "rest"} | common
    return linear_divergence(
        hidden,
        weight,
        seen.hidden,
        seen.head.weight,
        teacher_bias=seen.head.bias,
        teacher_softcap=seen.head.softcap,
        teacher_temperature=at * scale / seen.head.scale,
        **options,
    )


def _products(seen: Seen, weight: Tensor) -> float:
    """Return the FLOP of the heads for a row: both forward, and the policy's backward twice that."""
    of_teacher = 0 if isinstance(seen, Likeliest) else 2 * seen.head.weight.numel()
    return 6.0 * weight.numel() + of_teacher
