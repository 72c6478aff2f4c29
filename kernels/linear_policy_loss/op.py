"""`linear_terms_loss` as a differentiable op of torch: its forward makes the gradients, its backward returns them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from ..checks import Arguments, check_first_derivative
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
    lora = None if lora_a is None or lora_b is None else HeadLora(lora_a, lora_b, lora_scale)
    head = Head(weight, bias, lora, temperature.dtype)
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

    def like(t: Tensor | None, needed: bool, empty: tuple[int, ...]) -> Tensor:
        return temperature.new_empty(t.shape if needed and t is not None else empty)

    K = len(objectives.split("\n"))
    return (
        temperature.new_empty(()),
        temperature.new_empty(K, dtype=torch.float64),
        temperature.new_empty((K, len(SUMS)), dtype=torch.float64),
        temperature.new_empty((2, target.shape[0])),
        hidden.new_empty(hidden.shape if need[0] else 0, dtype=fused.gradient_dtype(hidden)),
        like(weight, need[1] and weight_grad is None, (0,)),
        like(bias, need[2], (0,)),
        like(lora_a, need[3] or need[4], (0,)),
        like(lora_b, need[3] or need[4], (0,)),
    )


_SCHEMA = torch.library.infer_schema(_one_pass, mutates_args=())


def _without_accumulator(*arguments: Any) -> tuple[Tensor, ...]:
    return _one_pass(*(*arguments[:-1], None))


linear_terms_loss_op = torch.library.custom_op(
    "rolltree::linear_terms_loss", _without_accumulator, mutates_args=(), schema=_SCHEMA
)
"""`_one_pass` whose backward adds weight's gradient, times that of the loss, to ``weight_grad``."""

linear_terms_loss_into_op = torch.library.custom_op(
    "rolltree::linear_terms_loss_into",
    _one_pass,
    mutates_args=("weight_grad",),
    schema=_SCHEMA.replace("Tensor? weight_grad", "Tensor(a!)? weight_grad"),
)
"""`_one_pass`, which adds weight's gradient to ``weight_grad`` itself; `AccumulatedLoss` differentiates it."""

linear_terms_loss_op.register_fake(lambda *arguments: _fake(*arguments[:-1], None))
linear_terms_loss_into_op.register_fake(_fake)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.weight_grad = inputs[1].dtype, inputs[-1]
    # Autograd expects a list as the gradient of a list of tensors (of which an empty list is one), else None.
    ctx.constants = [
        [None] * len(x) if isinstance(x, list | tuple) and all(isinstance(t, Tensor) for t in x) else None
        for x in inputs[5:]
    ]
    # Not by `save_for_backward`, which would keep a second reference, so that autograd would copy the gradients.
    ctx.gradients = list(output[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _take_gradients(ctx: Any) -> list[Any]:
    gradients: list[Any]
    gradients, ctx.gradients = ctx.gradients, []
    if not gradients:
        raise RuntimeError(
            "linear_policy_loss: an earlier backward has used its gradients; call it again, or use linear_logprob and "
            "policy_loss, which allow several backwards."
        )
    return gradients


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    check_first_derivative("linear_policy_loss")
    if grad is None:
        return *(None,) * 5, *ctx.constants
    gradients = _take_gradients(ctx)
    result: list[Tensor | None] = []
    for i, needed in enumerate(ctx.needs_input_grad[:5]):
        gradient = gradients[i]
        gradients[i] = None  # autograd then has the only reference
        if not needed:
            result.append(None)
            continue
        if i == 1 and ctx.weight_grad is not None:
            ctx.weight_grad.addcmul_(gradient, grad)
            result.append(None)
            continue
        dtype = ctx.dtype
        factor = grad.view(1)  # not [], which torch would round to the gradient's dtype before it multiplies
        if torch.compiler.is_compiling():
            result.append((gradient * factor).to(dtype))
        elif dtype == gradient.dtype:
            result.append(gradient.mul_(factor))
        else:  # scaled and cast in one kernel
            result.append(torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype)))
    return *result, *ctx.constants


linear_terms_loss_op.register_autograd(_autograd_backward, setup_context=_setup_context)


_runs = itertools.count(1)


class AccumulatedLoss(torch.autograd.Function):
    """`linear_terms_loss_into_op` with a backward: torch registers none for an op that writes to an argument.

    Activation checkpointing runs a forward again, and the second run must not add to ``weight_grad``. torch's own is
    recognised. By any other the backward gets the number of the second run, which is a saved tensor, and raises.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        *others, need, weight_grad = arguments
        if _is_run_again():
            need = [need[0], False, *need[2:]]
        out: tuple[Tensor, ...] = linear_terms_loss_into_op(*others, need, weight_grad)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _setup_context(ctx, inputs, output)
        if not torch.compiler.is_compiling():
            ctx.run = next(_runs)
            ctx.save_for_backward(torch.tensor(0 if _is_run_again() else ctx.run))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative("linear_policy_loss")
        if not torch.compiler.is_compiling() and int(ctx.saved_tensors[0]) not in (0, ctx.run):
            raise RuntimeError(
                "linear_policy_loss: checkpointing has run a loss with in_forward=True twice, so weight_grad holds "
                "weight's gradient twice; leave in_forward out, use torch.utils.checkpoint, or compute the loss "
                "outside of the checkpoint."
            )
        none = (None,) * (len(ctx.needs_input_grad) - 5)
        if grad is None:
            return *(None,) * 5, *none
        Arguments("linear_policy_loss", "the loss", grad).holds(
            grad == 1,
            "with in_forward=True weight's gradient is in weight_grad before the backward, so the loss must be "
            "differentiated as it is; put other factors into normalizer",
        )
        d_hidden, _, *others = _take_gradients(ctx)
        gradients = d_hidden, None, *(d.to(ctx.dtype) for d in others)
        return *(d if need else None for d, need in zip(gradients, ctx.needs_input_grad, strict=False)), *none


def _is_run_again() -> bool:
    """Return whether torch's non-reentrant checkpointing runs this for the second time.

    The first run of reentrant checkpointing has no gradient, so its second run counts as the first.
    """
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("unpack_hook", "backward"):
            return code.co_name == "unpack_hook"
        frame = frame.f_back
    return False
