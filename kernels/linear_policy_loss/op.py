"""`linear_terms_loss` as a differentiable op of torch: its forward makes the gradients, its backward returns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..forward_gradients import accumulated, backward, empty_gradients, keep_gradients, registered
from ..linear_logprob import chunked
from ..linear_logprob.head import Head, HeadGradient, HeadLora
from ..linear_logprob.op import backend_of, check_values, row_kernels
from ..linear_logprob.targets import Targets
from ..policy_loss import SUMS, Objective, PolicyFields
from . import fused
from .plan import HeadPlan, even_cuts
from .terms import Term, TermEvaluator


@dataclass(frozen=True)
class HeadPass:
    """One pass of the head over the rows of a plan; the arguments of `linear_terms_loss_op`."""

    hidden: Tensor  # [R, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora: HeadLora | None
    softcap: float | None
    target: Tensor  # [P] int64, by row
    temperature: Tensor  # [R]
    terms: Sequence[Term]  # K, on M targets
    scale: Tensor | None  # [K], of the terms in the sum; None: one term
    plan: HeadPlan
    need: Sequence[bool]  # [5], gradients of hidden, weight, bias, a, b
    weight_grad: Tensor | None  # [V, H], to which weight's gradient is added

    def encoded(self) -> tuple[Any, ...]:
        """Return the arguments in the order of `_one_pass`, without objects: ops of torch take none."""
        lora_a, lora_b, lora_scale = (None, None, 0.0) if self.lora is None else self.lora
        tensors, names = zip(*(t.fields.tensors() for t in self.terms), strict=True)
        return (
            self.hidden,
            self.weight,
            self.bias,
            lora_a,
            lora_b,
            lora_scale,
            self.plan.start,
            self.target,
            self.plan.place,
            self.temperature,
            self.softcap or 0.0,
            [tensor for of_term in tensors for tensor in of_term],
            "\n".join(names),
            "\n".join(t.objective.encoded for t in self.terms),
            self.scale,
            self.plan.row_cuts,
            self.plan.target_cuts,
            self.plan.path_cuts,
            self.need,
            self.weight_grad,
        )


def _decoded(tensors: Sequence[Tensor], names: str, objectives: str) -> list[tuple[PolicyFields, Objective]]:
    terms, rest = [], list(tensors)
    for line, text in zip(names.split("\n"), objectives.split("\n"), strict=True):
        count, objective = len(line.split()), Objective.decode(text)
        terms.append((PolicyFields.from_tensors(rest[:count], line, objective.aggregation), objective))
        rest = rest[count:]
    return terms


def _one_pass(  # `HeadPass.encoded` makes the arguments
    hidden: Tensor,  # [R, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    start: Tensor,  # [R + 1] int64
    target: Tensor,  # [P] int64, by row
    place: Tensor | None,  # [P] int64, of each target in the fields
    temperature: Tensor,  # [R]
    softcap: float,  # 0: none
    fields: Sequence[Tensor],  # of K terms on M targets
    names: str,  # of the fields, a line a term
    objectives: str,  # `Objective.encoded`, a line a term
    scale: Tensor | None,  # [K], of the terms in the sum; None: one term
    row_cuts: Sequence[int],
    target_cuts: Sequence[int],
    path_cuts: Sequence[int],
    need: Sequence[bool],  # [5], gradients of hidden, weight, bias, a, b
    weight_grad: Tensor | None,  # [V, H], to which weight's gradient is added
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(scaled sum of the losses [], sum of each fp64 [K], sums of the metrics fp64 [K, len(SUMS)], log-prob
    and entropy of the targets [2, P], gradients of hidden, weight, bias, a, b)``.

    Gradients of the head are in the accumulation dtype, and so is that of hidden in fp16. A gradient that is not
    needed, or that is added to ``weight_grad``, is empty.
    """
    check_values("linear_policy_loss", hidden, target, None, temperature, len(weight))
    head = Head.of_flat(weight, bias, lora_a, lora_b, lora_scale, temperature.dtype)
    gradient = HeadGradient(head, need[1], need[2], need[3] or need[4], weight_grad if need[1] else None)
    targets = Targets(start, target, None, place is None and len(target) == len(hidden))
    terms = TermEvaluator(_decoded(fields, names, objectives), scale, place, temperature)
    if not row_cuts:  # `plan_everything` under a compiler
        row_cuts = target_cuts = even_cuts(len(hidden), chunked.chunk_rows(len(hidden), len(weight), hidden.device))
    cuts = fused.Cuts(list(row_cuts), list(target_cuts), list(path_cuts))
    rows = row_kernels(backend_of("linear_policy_loss", hidden))
    inputs = fused.Inputs(hidden, head, targets, temperature, softcap)
    d_hidden, scores = fused.one_pass(rows, inputs, terms, cuts, need[0], gradient)
    total, totals, sums = terms.result()
    d_weight, d_bias, d_a, d_b = gradient.results()
    d_weight = temperature.new_empty(0) if weight_grad is not None else d_weight
    return total.to(temperature.dtype), totals, sums, scores, d_hidden, d_weight, d_bias, d_a, d_b


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, target, _, temperature, _, _, _, objectives, *_, need, weight_grad = rest
    K = len(objectives.split("\n"))
    of_weight = need[1] and weight_grad is None
    return (
        temperature.new_empty(()),
        temperature.new_empty(K, dtype=torch.float64),
        temperature.new_empty((K, len(SUMS)), dtype=torch.float64),
        temperature.new_empty((2, target.shape[0])),
        *empty_gradients((hidden, weight, bias, lora_a, lora_b), temperature.dtype, [need[0], of_weight, *need[2:]]),
    )


_setup_context, _autograd_backward = keep_gradients, partial(backward, "linear_policy_loss")
linear_terms_loss_op, linear_terms_loss_into_op = registered("linear_terms_loss", _one_pass, _fake, _autograd_backward)


def _into(*arguments: Any) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = linear_terms_loss_into_op(*arguments)
    return out


AccumulatedLoss = accumulated("linear_policy_loss", _into)
