"""Autograd of ops whose forward makes the gradients.

The first five inputs of such an op are hidden, the head's weight and bias, and a and b of its adapter; its last two are
``need``, a list that says which of these need a gradient, and ``weight_grad``, to which weight's gradient is added. Its
first output is the loss, its last five are the gradients of these inputs. The backward multiplies them by the gradient
of the loss and returns them once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from .checks import Arguments, check_first_derivative

INPUTS = 5
"""The inputs that have gradients."""
INSTEAD = {"linear_policy_loss": ", or use linear_logprob and policy_loss, which allow several backwards"}
"""The option that allows several backward passes, by the public op."""


def check_in_forward(check: Arguments, weight: Tensor, weight_grad: Tensor | None) -> None:
    """Check that a forward can add weight's gradient to ``weight_grad``.

    Raises:
        ValueError: it cannot; the message says why.
    """
    check.require(weight_grad is not None, "in_forward adds to weight_grad in the forward; give weight_grad")
    if weight_grad is not None:
        check.require(weight_grad.is_contiguous(), "with in_forward=True weight_grad must be contiguous")
        check.require(
            weight.dtype != torch.float16, "fp16 cannot hold gradients divided by normalizer; leave in_forward out"
        )


def gradient_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which the forward makes the gradient of hidden: the backward still multiplies it, by a
    GradScaler's scale among others, so its size may not fit fp16."""
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


def empty_gradients(inputs: tuple[Tensor | None, ...], accumulator: torch.dtype, need: Any) -> tuple[Tensor, ...]:
    """Return gradients ``[5]`` without values, for a fake implementation; those that are not needed are empty."""
    hidden, *others = inputs
    assert hidden is not None

    def like(t: Tensor | None, needed: bool) -> Tensor:
        return hidden.new_empty(t.shape if needed and t is not None else (0,), dtype=accumulator)

    of_hidden = hidden.new_empty(hidden.shape if need[0] else 0, dtype=gradient_dtype(hidden))
    needs = need[1], need[2], need[3] or need[4], need[3] or need[4]
    return of_hidden, *(like(t, needed) for t, needed in zip(others, needs, strict=True))


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.weight_grad = inputs[1].dtype, inputs[-1]
    # Autograd expects a list as the gradient of a list of tensors (of which an empty list is one), else None.
    ctx.constants = [
        [None] * len(x) if isinstance(x, list | tuple) and all(isinstance(t, Tensor) for t in x) else None
        for x in inputs[INPUTS:]
    ]
    # Not by `save_for_backward`, which would keep a second reference, so that autograd would copy the gradients.
    ctx.gradients = list(output[-INPUTS:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def take(ctx: Any, op: str) -> list[Any]:
    """Return the gradients, of which ``ctx`` then has none.

    Raises:
        RuntimeError: they were taken before.
    """
    gradients: list[Any]
    gradients, ctx.gradients = ctx.gradients, []
    if not gradients:
        raise RuntimeError(f"{op}: an earlier backward has used its gradients; call it again{INSTEAD.get(op, '')}.")
    return gradients


def backward(op: str, ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    check_first_derivative(op)
    if grad is None:
        return *(None,) * INPUTS, *ctx.constants
    gradients = take(ctx, op)
    result: list[Tensor | None] = []
    for i, needed in enumerate(ctx.needs_input_grad[:INPUTS]):
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


def registered(
    name: str, one_pass: Callable[..., Any], fake: Callable[..., Any], of_autograd: Callable[..., Any]
) -> tuple[torch.library.CustomOpDef, torch.library.CustomOpDef]:
    """Register ``one_pass`` with torch as two ops, ``name`` with the backward ``of_autograd``, which adds weight's
    gradient, times that of the loss, to ``weight_grad``; and one that adds it in the forward, for `accumulated`."""
    schema = torch.library.infer_schema(one_pass, mutates_args=())

    def without_accumulator(*arguments: Any) -> Any:
        return one_pass(*(*arguments[:-1], None))

    plain = torch.library.custom_op(f"rolltree::{name}", without_accumulator, mutates_args=(), schema=schema)
    into = torch.library.custom_op(
        f"rolltree::{name}_into",
        one_pass,
        mutates_args=("weight_grad",),
        schema=schema.replace("Tensor? weight_grad", "Tensor(a!)? weight_grad"),
    )
    plain.register_fake(lambda *arguments: fake(*arguments[:-1], None))
    into.register_fake(fake)
    plain.register_autograd(of_autograd, setup_context=keep_gradients)
    return plain, into


_runs = itertools.count(1)


def accumulated(public: str, into: Callable[..., tuple[Tensor, ...]]) -> type[torch.autograd.Function]:
    """Return ``into``, which calls the op that adds weight's gradient to ``weight_grad`` itself, with a backward: torch
    registers none for an op that writes to an argument.

    Activation checkpointing runs a forward again, and the second run must not add to ``weight_grad``. torch's own is
    recognised. By any other the backward gets the number of the second run, which is a saved tensor, and raises.
    """

    class Accumulated(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            *others, need, weight_grad = arguments
            if _is_run_again():
                need = [need[0], False, *need[2:]]
            return into(*others, need, weight_grad)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            keep_gradients(ctx, inputs, output)
            if not torch.compiler.is_compiling():
                ctx.run = next(_runs)
                ctx.save_for_backward(torch.tensor(0 if _is_run_again() else ctx.run))

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
            check_first_derivative(public)
            if not torch.compiler.is_compiling() and int(ctx.saved_tensors[0]) not in (0, ctx.run):
                raise RuntimeError(
                    f"{public}: checkpointing has run a loss with in_forward=True twice, so weight_grad holds "
                    "weight's gradient twice; leave in_forward out, use torch.utils.checkpoint, or compute the loss "
                    "outside of the checkpoint."
                )
            none = (None,) * (len(ctx.needs_input_grad) - INPUTS)
            if grad is None:
                return *(None,) * INPUTS, *none
            Arguments(public, "the loss", grad).holds(
                grad == 1,
                "with in_forward=True weight's gradient is in weight_grad before the backward, so the loss must be "
                "differentiated as it is; put other factors into normalizer",
            )
            d_hidden, _, *others = take(ctx, public)
            gradients = d_hidden, None, *(d.to(ctx.dtype) for d in others)
            return *(d if need else None for d, need in zip(gradients, ctx.needs_input_grad, strict=False)), *none

    return Accumulated


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
