"""`linear_logprob` as a differentiable op of torch: schema, fake implementation, autograd, choice of backend."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..checks import Arguments, check_first_derivative
from . import chunked, frozen, reference
from .head import Head, HeadGradient
from .targets import group_by_row


@torch.library.custom_op("rolltree::linear_logprob", mutates_args=())
def linear_logprob_op(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,  # 0: none
    want_entropy: bool,
    want_sum_p2: bool,
    frozen_head: bool,
    weight_grad: Tensor | None,  # [V, H], to which the backward adds weight's gradient, instead of returning it
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(logprob [M], logsumexp [N], correction [N], entropy, sum_p2, kept)``.

    ``kept`` is what the backward reuses: the direction ``[N, H]`` of a frozen head, the logits ``[N, V]`` of a narrow
    vocabulary, or nothing.
    """
    check_values("linear_logprob", hidden, target, row, temperature, len(weight))
    head = Head.of_flat(weight, bias, lora_a, lora_b, lora_scale, temperature.dtype)
    backend = backend_of("linear_logprob", hidden)
    targets = group_by_row(target, row, len(hidden))
    run = reference.forward if backend == "reference" else functools.partial(chunked.forward, row_kernels(backend))
    logprob, *rest = run(hidden, head, targets, temperature, softcap, want_entropy, want_sum_p2, frozen_head)
    if targets.order is not None:
        logprob = torch.empty_like(logprob).index_copy_(0, targets.order, logprob)
    return logprob, *rest  # type: ignore[return-value]


def check_values(
    op: str,
    rows: Tensor,  # [N, ...]
    target: Tensor,  # [M]
    row: Tensor | None,  # [M]
    temperature: Tensor,  # [N]
    vocabulary: int,
) -> None:
    """Check that targets exist and temperatures are positive. On a GPU a target out of range scores NaN instead."""
    check = Arguments(op, "rows", rows)
    remedy = "mask or leave out targets that are not to be scored"
    if target.device.type == "cpu":
        check.index("target", target, vocabulary, remedy=remedy)
    if row is not None:
        check.index("row", row, len(rows), remedy=remedy)
    check.positive("temperature", temperature)


@linear_logprob_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, _, _, target, _, temperature, _, want_entropy, want_sum_p2, frozen_head, _ = rest
    N, new = hidden.shape[0], temperature.new_empty
    return (
        new(target.shape[0]),
        new(N),
        new(N),
        new(N if want_entropy else 0),
        new(N if want_sum_p2 else 0),
        torch.empty_like(hidden) if frozen_head else new(chunked.kept_shape(hidden, weight)),
    )


@torch.library.custom_op("rolltree::linear_logprob_backward", mutates_args=("weight_grad",))
def linear_logprob_backward_op(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    lora_a: Tensor | None,  # [r, H]
    lora_b: Tensor | None,  # [V, r]
    lora_scale: float,
    target: Tensor,  # [M] int64
    row: Tensor | None,  # [M] int64
    temperature: Tensor,  # [N]
    softcap: float,
    logprob: Tensor,  # [M]
    logsumexp: Tensor,  # [N]
    correction: Tensor,  # [N]
    entropy: Tensor,  # [N], or [0]
    sum_p2: Tensor,  # [N], or [0]
    kept: Tensor,  # see `linear_logprob_op`
    frozen_head: bool,
    grad_logprob: Tensor | None,  # [M]
    grad_logsumexp: Tensor | None,  # [N]
    grad_entropy: Tensor | None,  # [N]
    grad_sum_p2: Tensor | None,  # [N]
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    need_lora: bool,
    weight_grad: Tensor | None,  # [V, H]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight, bias and the adapter's a and b; empty where not needed or added to
    weight_grad."""
    head = Head.of_flat(weight, bias, lora_a, lora_b, lora_scale, temperature.dtype)
    need = HeadGradient(head, need_weight, need_bias, need_lora, weight_grad if need_weight else None)
    absent = temperature.new_empty(0)
    targets = group_by_row(target, row, len(hidden))
    a = torch.zeros_like(logprob) if grad_logprob is None else grad_logprob.contiguous()
    if targets.order is not None:
        a, logprob = a[targets.order], logprob[targets.order]
    if frozen_head and grad_entropy is None and grad_sum_p2 is None:
        d_hidden = frozen.backward(head, targets, temperature, softcap, logprob, logsumexp, kept, a, grad_logsumexp)
    else:
        backend = backend_of("linear_logprob", hidden)
        inputs = hidden, head, targets, temperature, softcap
        statistics = logsumexp, correction, entropy, sum_p2, absent if frozen_head else kept
        upstream = (
            a,
            torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp.contiguous(),
            absent if grad_entropy is None else grad_entropy.contiguous(),
            absent if grad_sum_p2 is None else grad_sum_p2.contiguous(),
        )
        if backend == "reference":
            d_hidden = reference.backward(*inputs, *statistics, *upstream, need_hidden, need)
        else:
            d_hidden = chunked.backward(row_kernels(backend), *inputs, *statistics, *upstream, need_hidden, need)
    dtype = weight.dtype
    d_weight, *d_others = need.results()
    d_weight = temperature.new_empty(0) if weight_grad is not None else d_weight
    d_bias, d_a, d_b = (d.to(dtype) for d in d_others)
    return d_hidden, d_weight.to(dtype), d_bias, d_a, d_b


@linear_logprob_backward_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, need_hidden, need_weight, need_bias, need_lora, weight_grad = rest

    def like(t: Tensor | None, needed: bool) -> Tensor:
        return torch.empty_like(t) if needed and t is not None else weight.new_empty(0)

    return (
        like(hidden, need_hidden),
        like(weight, need_weight and weight_grad is None),
        like(bias, need_bias),
        like(lora_a, need_lora),
        like(lora_b, need_lora),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, a, b, ctx.lora_scale, target, row, temperature, ctx.softcap, *rest = inputs
    *ctx.want_flags, ctx.frozen_head, ctx.weight_grad = rest
    ctx.backend = dispatch.current_override()
    ctx.save_for_backward(hidden, weight, bias, a, b, target, row, temperature, *output)
    ctx.mark_non_differentiable(output[2], output[5])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    check_first_derivative("linear_logprob")
    hidden, weight, bias, lora_a, lora_b, target, row, temperature, *output = ctx.saved_tensors
    logprob, logsumexp, correction, entropy, sum_p2, kept = output
    grad_logprob, grad_logsumexp, _, grad_entropy, grad_sum_p2, _ = upstream
    need = list(ctx.needs_input_grad[:5])
    need[3] = need[4] = need[3] or need[4]  # the adapter's two gradients come together
    of_wanted = [grad if w else None for w, grad in zip(ctx.want_flags, (grad_entropy, grad_sum_p2), strict=True)]
    grads = grad_logprob, grad_logsumexp, *of_wanted
    head = hidden, weight, bias, lora_a, lora_b, ctx.lora_scale
    statistics = logprob, logsumexp, correction, entropy, sum_p2, kept, ctx.frozen_head
    with dispatch.restored_backend(ctx.backend):
        gradients = linear_logprob_backward_op(
            *head, target, row, temperature, ctx.softcap, *statistics, *grads, *need[:4], ctx.weight_grad
        )
    need[1] = need[1] and ctx.weight_grad is None
    return *(g if needed else None for g, needed in zip(gradients, need, strict=True)), *(None,) * 9


linear_logprob_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def row_kernels(backend: str) -> chunked.RowKernels:
    """Return the row kernels of ``backend``."""
    if backend == "triton":
        from . import triton  # optional dependency

        return triton
    return reference if backend == "reference" else chunked.COMPILED[backend]


BACKENDS = ("triton", "cpu", "reference")


def backend_of(
    op: str, values: Tensor, backends: Sequence[str] = BACKENDS, unfit: Mapping[str, str] | None = None
) -> str:
    """Return the name of the backend that runs ``op`` on ``values``; a GPU's backends do not take fp64.

    ``unfit`` is that of `dispatch.choose`.
    """
    names = ("cpu", "reference") if values.dtype == torch.float64 else backends
    return dispatch.choose(op, {name: functools.partial(str, name) for name in names}, values.device, unfit)()
