"""The custom ops ``rolltree::tree_attention`` and ``..._backward``: fakes, autograd, choice of the backend.

Saved for the backward pass: the inputs, the output and the log-sum-exp; nothing of size T x T.

A sink is one more key, of score ``sink[h]`` and value 0. With the visible keys' lse and lse' = log(exp lse + exp sink),

    out' = exp(lse - lse') out              d sink[h] = - sum_i exp(sink[h] - lse'[h, i]) <grad_out[i, h], out'[i, h]>

and a backend's backward pass, which reads probabilities as exp(S - lse) and the output from what it is given, computes
the gradients of q, k and v from out' and lse' unchanged. So no backend has code for sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..checks import check_first_derivative
from . import reference, spoiled
from .reference import Scoring

_FORWARD: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "flash": dispatch.imported(__package__, "flash", "tree_attention_forward"),
    "invariant": dispatch.imported(__package__, "invariant", "tree_attention_forward"),
    "triton": dispatch.imported(__package__, "triton", "tree_attention_forward"),
    "cpu": dispatch.compiled_op("cpu", "tree_attention"),
    "reference": reference.tree_attention_forward,
}
_BACKWARD: Mapping[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "flash": dispatch.imported(__package__, "flash", "tree_attention_backward"),
    "triton": dispatch.imported(__package__, "triton", "tree_attention_backward"),
    "cpu": dispatch.compiled_op("cpu", "tree_attention_backward"),
    "reference": reference.tree_attention_backward,
}


def _choose(table: Mapping[str, Callable[..., Any]], q: Tensor) -> Callable[..., Any]:
    # Only the reference has float64; it exists for gradient checks.
    return table["reference"] if q.dtype == torch.float64 else dispatch.choose("tree_attention", table, q.device)


@torch.library.custom_op("rolltree::tree_attention", mutates_args=())
def tree_attention_op(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None = None,  # [Hq]
) -> tuple[Tensor, Tensor]:
    """Return out [T, Hq, D] and the log-sum-exp [Hq, T], both contiguous. No gradient flows from the latter.

    With ``sink`` both count it: the latter is that of the scores and the sink.
    """
    run, scoring = _choose(_FORWARD, q), Scoring(subtree_end, position, scale, window, softcap)
    out, lse = spoiled.forward(run, q, k, v, scoring) if q.device.type == "cpu" else run(q, k, v, scoring)
    if sink is None:
        return out, lse
    factor, lse = with_sink(lse, sink[:, None])
    return (out * factor.transpose(0, 1)[..., None]).to(out.dtype), lse


def with_sink(lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of an output, and the log-sum-exp with ``sink``, given that of the keys alone; in its dtype."""
    sink_logit = sink.to(lse.dtype)
    high, low = torch.maximum(lse, sink_logit), torch.minimum(lse, sink_logit)
    # not logaddexp, whose last bit depends on the place of a number
    both = torch.where(high == -math.inf, high, high + torch.log1p(torch.exp(low - high)))
    return torch.exp(lse - both.masked_fill(both == -math.inf, 0.0)), both


@tree_attention_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


@torch.library.custom_op("rolltree::tree_attention_backward", mutates_args=())
def tree_attention_backward_op(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [Hq, T]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, contiguous."""
    if grad_out.stride(-1) != 1:  # an expanded gradient, such as that of a sum
        grad_out = grad_out.contiguous()
    scoring = Scoring(subtree_end, position, scale, window, softcap)
    run, arguments = _choose(_BACKWARD, q), (grad_out, q, k, v, out, lse, scoring)
    return spoiled.backward(run, *arguments) if q.device.type == "cpu" else run(*arguments)


@tree_attention_backward_op.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, subtree_end, position, ctx.scale, ctx.window, ctx.softcap, sink = inputs
    ctx.backend = dispatch.current_override()
    ctx.save_for_backward(q, k, v, *output, subtree_end, position, sink)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    check_first_derivative("tree_attention")
    q, k, v, out, lse, subtree_end, position, sink = ctx.saved_tensors
    with dispatch.restored_backend(ctx.backend):
        grads = tree_attention_backward_op(
            grad_out, q, k, v, out, lse, subtree_end, position, ctx.scale, ctx.window, ctx.softcap
        )
    return *grads, None, None, None, None, None, None if sink is None else _sink_grad(grad_out, out, lse, sink)


def _sink_grad(grad_out: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:  # [Hq]
    products = grad_out.to(lse.dtype) * out.to(lse.dtype)
    delta = torch.where(grad_out == 0, 0, products).sum(-1)  # [T, Hq]; a row without a gradient may be NaN
    share = torch.exp(sink.to(lse.dtype) - lse.transpose(0, 1).masked_fill(lse.transpose(0, 1) == -math.inf, math.inf))
    return -torch.where(delta == 0, 0, share * delta).sum(0).to(sink.dtype)


tree_attention_op.register_autograd(_backward, setup_context=_setup_context)
