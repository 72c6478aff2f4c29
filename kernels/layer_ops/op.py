"""The custom ops ``rolltree::rms_norm``, ``rotate`` and ``silu_mul``: fakes, autograd, choice of the backend.

The backward pass saves the inputs, and of a norm one number a row. Further rows of the inputs' size that Transformers'
modules save are computed again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..checks import refuse_second_derivative
from . import reference

OPS = ("rms_norm", "rms_norm_backward", "rotate", "silu_mul", "silu_mul_backward")
_CPU = SimpleNamespace(**{name: dispatch.compiled_op("cpu", name) for name in OPS})  # csrc/cpu/layer_ops.cpp, silu_mul
_BACKENDS: Mapping[str, Callable[[], Any]] = {
    "triton": lambda: importlib.import_module(".triton", __package__),  # optional dependency
    "cpu": lambda: _CPU,
    "reference": lambda: reference,
}
_HALF = {name: _BACKENDS[name] for name in ("triton", "reference")}


def _backend(op: str, x: Tensor) -> Any:
    """Return the module or namespace that has `OPS`; their arguments are those of `reference`."""
    if x.dtype == torch.float64:  # the reference alone has it; it exists for gradient checks
        return reference
    return dispatch.choose(op, _BACKENDS if x.dtype == torch.float32 else _HALF, x.device)()


def is_plain(*tensors: Tensor) -> bool:
    """Return whether a call records no gradient and nothing traces or transforms it.

    Then the op's function is called directly: the dispatcher takes longer than most of the kernels.
    """
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


# ---- RMSNorm


def norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return out [..., H] and the factor of each row [N], in float32. No gradient flows from the latter."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out, factor = _backend("rms_norm", x).rms_norm(rows, weight.contiguous(), eps)
    return out.view(x.shape), factor


rms_norm_op = torch.library.custom_op("rolltree::rms_norm", norm, mutates_args=())


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=dtype)


@torch.library.custom_op("rolltree::rms_norm_backward", mutates_args=())
def rms_norm_backward_op(
    dy: Tensor,  # [..., H]
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    factor: Tensor,  # [N]
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., H] and of weight [H], the latter empty where it is not needed."""
    dy_rows, rows = (t.reshape(-1, t.shape[-1]).contiguous() for t in (dy, x))
    backend = _backend("rms_norm", x)
    dx, dweight = backend.rms_norm_backward(dy_rows, rows, weight.contiguous(), factor, need_weight)
    return dx.view(x.shape), dweight


@rms_norm_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, factor: Tensor, need_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if need_weight else 0)


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.backend = dispatch.current_override()
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    x, weight, factor = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[1]
    with dispatch.restored_backend(ctx.backend):
        dx, dweight = rms_norm_backward_op(dy, x, weight, factor, need_weight)
    return dx, dweight if need_weight else None, None


rms_norm_op.register_autograd(_rms_norm_backward, setup_context=_setup_rms_norm)
rms_norm_backward_op.register_autograd(lambda *_: refuse_second_derivative("rms_norm"))


# ---- rotary embedding


def turned(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, in the memory layout of `torch.empty_like`."""
    return _rotated(q, k, cos, sin, back=False)


rotate_op = torch.library.custom_op("rolltree::rotate", turned, mutates_args=())


@torch.library.custom_op("rolltree::rotate_backward", mutates_args=())
def rotate_backward_op(
    dq: Tensor,  # [B, Hq, T, D]
    dk: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k."""
    return _rotated(dq, dk, cos, sin, back=True)


@rotate_op.register_fake
@rotate_backward_op.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_last_contiguous(q)), torch.empty_like(_last_contiguous(k))


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    q, k = _last_contiguous(q), _last_contiguous(k)
    out: tuple[Tensor, Tensor] = _backend("rotate", q).rotate(q, k, cos.contiguous(), sin.contiguous(), back)
    return out


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.backend = dispatch.current_override()
    ctx.save_for_backward(*inputs[2:])


def _rotate_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    with dispatch.restored_backend(ctx.backend):
        return *rotate_backward_op(dq, dk, *ctx.saved_tensors), None, None


rotate_op.register_autograd(_rotate_backward, setup_context=_setup_rotate)


def _rotate_again(ctx: Any, ddq: Tensor, ddk: Tensor) -> tuple[Tensor | None, ...]:
    with dispatch.restored_backend(ctx.backend):
        return *rotate_op(ddq, ddk, *ctx.saved_tensors), None, None


rotate_backward_op.register_autograd(_rotate_again, setup_context=_setup_rotate)  # the gradient is linear in dq, dk


# ---- the gated unit


def gated(
    gate: Tensor,  # [...]
    up: Tensor,  # [...]
) -> Tensor:  # [...]
    out: Tensor = _backend("silu_mul", gate).silu_mul(gate.contiguous(), up.contiguous())
    return out


silu_mul_op = torch.library.custom_op("rolltree::silu_mul", gated, mutates_args=())


@silu_mul_op.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("rolltree::silu_mul_backward", mutates_args=())
def silu_mul_backward_op(
    dy: Tensor,  # [...]
    gate: Tensor,  # [...]
    up: Tensor,  # [...]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    gradients: tuple[Tensor, Tensor] = _backend("silu_mul", gate).silu_mul_backward(
        dy.contiguous(), gate.contiguous(), up.contiguous()
    )
    return gradients


@silu_mul_backward_op.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_silu_mul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backend = dispatch.current_override()
    ctx.save_for_backward(*inputs)


def _silu_mul_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    with dispatch.restored_backend(ctx.backend):
        return silu_mul_backward_op(dy, *ctx.saved_tensors)


silu_mul_op.register_autograd(_silu_mul_backward, setup_context=_setup_silu_mul)
silu_mul_backward_op.register_autograd(lambda *_: refuse_second_derivative("silu_mul"))
