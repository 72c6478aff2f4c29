"""Autograd of the recurrences, and the choice of their backend.

Saved for the backward pass are the inputs, no state. On a CPU the definition runs: its products are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import reference
from .plan import RecurrencePlan, Windows

Backends = Mapping[str, Callable[..., Any]]


def _backends(module: str, name: str) -> Backends:
    definition = getattr(reference, name)
    return {"triton": dispatch.imported(__package__, module, name), "cpu": definition, "reference": definition}


_FORWARD = _backends("triton", "tree_recurrence_forward")
_BACKWARD = _backends("triton", "tree_recurrence_backward")
_CONVOLUTION = _backends("triton_convolution", "tree_convolution_forward")
_CONVOLUTION_BACKWARD = _backends("triton_convolution", "tree_convolution_backward")


def _choose(op: str, table: Backends, x: Tensor) -> Callable[..., Any]:
    # Only the reference has float64; it exists for gradient checks.
    return table["reference"] if x.dtype == torch.float64 else dispatch.choose(op, table, x.device)


class Recurrence(torch.autograd.Function):
    """Keeps the inputs only; the backward pass computes the chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        initial: Tensor | None,
        plan: RecurrencePlan,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.scale, ctx.backend = plan, scale, dispatch.current_override()
        ctx.save_for_backward(query, key, value, decay, beta, initial)
        with torch.autocast(query.device.type, enabled=False):
            run = _choose("tree_recurrence", _FORWARD, query)
            out: tuple[Tensor, Tensor] = run(query, key, value, decay, beta, initial, plan, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.autocast(saved[0].device.type, enabled=False), dispatch.restored_backend(ctx.backend):
            gradients = _choose("tree_recurrence", _BACKWARD, saved[0])(*grads, *saved, ctx.plan, ctx.scale)
        return *gradients, None, None


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
        ctx.windows, ctx.backend = windows, dispatch.current_override()
        ctx.save_for_backward(x, weight)
        out: Tensor = _choose("tree_convolution", _CONVOLUTION, x)(x, weight, bias, windows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with dispatch.restored_backend(ctx.backend):
            run = _choose("tree_convolution", _CONVOLUTION_BACKWARD, x)
            dx, dweight, dbias = run(grads[0], x, weight, ctx.windows)
        return dx, dweight, dbias if ctx.needs_input_grad[2] else None, None


class Rows(torch.autograd.Function):
    """Returns ``x[rows]``; its gradient adds up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        reference.add_rows(total, ctx.saved_tensors[0], grads[0])
        return total, None
