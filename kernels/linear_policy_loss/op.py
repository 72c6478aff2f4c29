"""`linear_policy_loss` as a differentiable op of torch: its forward makes the gradients, its backward hands them on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .. import dispatch
from ..linear_logprob import chunked, reference
from ..linear_logprob.head import Head, HeadGradient, HeadLora
from ..linear_logprob.op import check_values, row_kernels
from ..linear_logprob.pairs import Pairs
from ..policy_loss import SUMS, Objective, PolicyFields
from . import fused
from .plan import Schedule


@torch.library.custom_op("rolltree::linear_policy_loss", mutates_args=())
def linear_policy_loss_op(
    hidden: Tensor,  # [R, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    start: Tensor,  # [R + 1] int64
    target: Tensor,  # [P] int64, by row
    caller: Tensor | None,  # [P] int64, place of each pair in the fields
    temperature: Tensor,  # [R]
    softcap: float,  # 0: none
    fields: Sequence[Tensor],  # `PolicyFields.tensors`, of M pairs
    names: str,
    objective: str,  # `Objective.encoded`
    schedule: str,
    row_cuts: Sequence[int],
    pair_cuts: Sequence[int],
    block_cuts: Sequence[int],
    count_on_device: bool,
    need: Sequence[bool],  # [5], gradients of hidden, weight, bias, a, b
    weight_grad: Tensor | None,  # [V, H], to which the backward adds weight's gradient, instead of handing it on
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(sum of the losses [], sums of the metrics fp64, gradients of hidden, weight, bias, a, b)``.

    Gradients of the head are in the accumulation dtype; what is not needed is empty.
    """
    check_values("linear_policy_loss", hidden, target, None, temperature, len(weight))
    lora = None if lora_a is None or lora_b is None else HeadLora(lora_a, lora_b, lora_scale)
    head = Head(weight, bias, lora, temperature.dtype)
    gradient = HeadGradient(head, need[1], need[2], need[3] or need[4])
    given = fused.Inputs(
        hidden,
        head,
        Pairs(start, target, None, caller is None and len(target) == len(hidden)),
        caller,
        temperature,
        softcap,
        PolicyFields.from_tensors(fields, names, Objective.decode(objective).aggregation),
        Objective.decode(objective),
    )
    cuts = fused.Cuts(list(row_cuts), list(pair_cuts), list(block_cuts), count_on_device and lora is None)
    backends = ("cpu", "reference") if hidden.dtype == torch.float64 else dispatch.BACKENDS
    table = {b: partial(_BACKENDS[b], cast(Schedule, schedule), given, cuts, need[0], gradient) for b in backends}
    total, sums, d_hidden = dispatch.choose("linear_policy_loss", table, hidden.device)()
    return total.to(temperature.dtype), sums, d_hidden, gradient.weight, gradient.bias, gradient.a, gradient.b


def _chunked(backend: str, schedule: Schedule, given: fused.Inputs, *rest: Any) -> fused.Result:
    rows, cuts = row_kernels(backend), rest[0]
    rest = (cuts._replace(count_on_device=cuts.count_on_device and backend != "cpu"), *rest[1:])
    if schedule in ("fused_forward", "sequence_aligned"):
        return fused.one_pass(rows, given, *rest)
    return fused.two_phase(partial(chunked.forward, rows), partial(chunked.backward, rows), schedule, given, *rest[1:])


def _reference(schedule: Schedule, given: fused.Inputs, *rest: Any) -> fused.Result:
    schedule = schedule if schedule in ("logprob_only", "frozen_head") else "two_phase"
    return fused.two_phase(reference.forward, reference.backward, schedule, given, *rest[1:])


_BACKENDS = {b: partial(_chunked, b) for b in ("cuda", "triton", "cpu")} | {"reference": _reference}


@linear_policy_loss_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    start: Tensor,
    target: Tensor,
    caller: Tensor | None,
    temperature: Tensor,
    softcap: float,
    fields: Sequence[Tensor],
    names: str,
    objective: str,
    schedule: str,
    row_cuts: Sequence[int],
    pair_cuts: Sequence[int],
    block_cuts: Sequence[int],
    count_on_device: bool,
    need: Sequence[bool],
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def like(t: Tensor | None, needed: bool, empty: tuple[int, ...]) -> Tensor:
        return temperature.new_empty(t.shape if needed and t is not None else empty)

    return (
        temperature.new_empty(()),
        temperature.new_empty(len(SUMS), dtype=torch.float64),
        torch.empty_like(hidden) if need[0] else hidden.new_empty(0),
        like(weight, need[1], (0,)),
        like(bias, need[2], (0,)),
        like(lora_a, need[3] or need[4], (0,)),
        like(lora_b, need[3] or need[4], (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.weight_grad = inputs[1].dtype, inputs[-1]
    # what autograd expects for a constant: a list for a list of tensors (of which an empty list is one), else None
    ctx.constants = [
        [None] * len(x) if isinstance(x, list | tuple) and all(isinstance(t, Tensor) for t in x) else None
        for x in inputs[5:]
    ]
    # Not `save_for_backward`: that would hold the gradients while autograd takes them over, and so make it copy them.
    ctx.gradients = list(output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return *(None,) * 5, *ctx.constants
    if not ctx.gradients:
        raise RuntimeError(
            "linear_policy_loss: its gradients were handed on by an earlier backward; call it again, or linear_logprob "
            "and policy_loss, which allow several."
        )
    gradients, ctx.gradients = ctx.gradients, []
    result: list[Tensor | None] = []
    for i, needed in enumerate(ctx.needs_input_grad[:5]):
        gradient = gradients[i]
        gradients[i] = None  # nobody but autograd holds it from here on
        if not needed:
            result.append(None)
            continue
        if i == 1 and ctx.weight_grad is not None:
            ctx.weight_grad.addcmul_(gradient, grad)
            result.append(None)
            continue
        scaled = gradient * grad if torch.compiler.is_compiling() else gradient.mul_(grad.to(gradient.dtype))
        result.append(scaled if i == 0 else scaled.to(ctx.dtype))
    return *result, *ctx.constants


linear_policy_loss_op.register_autograd(_autograd_backward, setup_context=_setup_context)
