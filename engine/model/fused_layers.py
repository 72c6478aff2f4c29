"""Computes norms, rotary embedding and gated units of a Transformers model by `rolltree.kernels.layer_ops`.

Each module that computes exactly one of these gets a ``forward`` on the instance. Its class, weights, sub-modules and
hooks do not change, so adapters, checkpointing, sharding and saving work as before. A module is recognised by the code
of its class's ``forward``, which must equal Llama's. Rotary embedding is a function that attention calls by name; there
the instance runs its class's code with that one name bound to our function.

A call falls back to the original code inside `torch.compile`, which fuses these passes itself, for mixed dtypes, for
tensor subclasses, and if no kernel is built for the device and dtype.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama import modeling_llama as llama

from rolltree.kernels import dispatch
from rolltree.kernels.layer_ops import rms_norm, rotate, silu_mul

HOME = "transformers.models."
ROTARY = "apply_rotary_pos_emb"
BACKENDS = {("cpu", torch.float32): "cpu"} | {
    ("cuda", dtype): "triton" for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


def replace_forward(cls: Any, around: Callable[[Any], Any]) -> None:
    """Replace a class's forward by ``around(forward)``; that of a layer stays below the wrapper that checkpoints it.

    Transformers checkpoints a layer only where its class calls that wrapper first, and keeps all activations else.
    """
    if not issubclass(cls, GradientCheckpointingLayer):
        cls.forward = around(cls.forward)
        return
    cls.forward = around(cls.forward.__wrapped__)
    GradientCheckpointingLayer.__init_subclass__.__func__(cls)


def fuse_layers(model: nn.Module) -> nn.Module:
    """Make the layers of ``model`` use the fused ops; return the same ``model``.

    In float32 forward passes change only in the last bit of gated units; gradients are rounded less often. Modules
    whose ``forward`` was replaced, and subclasses of Transformers' own modules, are left alone. Fused norms and gated
    units have no second derivative. Fusing twice has no further effect; `unfuse_layers` undoes it. `nn.DataParallel` is
    not supported: its replicas share the attributes of one instance.
    """
    for module in model.modules():
        cls: Any = type(module)
        fused = _fused_forward(cls)
        if fused is not None and not _is_replaced(module) and (fused is not _gated_unit or _has_silu(module)):
            module.forward = _Fused(fused, module)
    return model


def unfuse_layers(model: nn.Module) -> nn.Module:
    """Restore the class's ``forward`` of the modules that `fuse_layers` changed; return the same ``model``."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Fused):
            del module.forward
    return model


class _Fused:
    """Binds a function to a module by a weak reference, so that weights are freed with the last use of a model."""

    __slots__ = ("_function", "_module")

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self._function, self._module = function, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fused:
        module = self._module()
        assert module is not None
        return _Fused(self._function, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "forward")  # the class's: a function made here cannot be pickled by name


def _is_replaced(module: nn.Module) -> bool:
    """Return True if the instance has a ``forward`` that is not its class's, ours included."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def _has_silu(module: Any) -> bool:
    return type(module.act_fn) in (nn.SiLU, SiLUActivation)


@functools.cache
def _fused_forward(cls: Any) -> Callable[..., Any] | None:
    """Return the ``forward`` for instances of a class; None if the class is not recognised."""
    if not cls.__module__.startswith(HOME) or not issubclass(cls, nn.Module):
        return None
    forward = cls.forward
    if _same(forward, llama.LlamaRMSNorm.forward):
        return _rms_norm
    if _same(forward, llama.LlamaMLP.forward):
        return _gated_unit
    turned = _global(inspect.unwrap(forward), ROTARY)
    if not (
        isinstance(forward, FunctionType)
        and _same(turned, llama.apply_rotary_pos_emb)
        and _same(_global(turned, "rotate_half"), llama.rotate_half)
    ):
        return None
    return _with_turning(forward, turned)


def _same(function: object, expected: object) -> bool:
    """Return True if two functions of Transformers have the same code, docstrings aside."""
    if not (isinstance(function, FunctionType) and isinstance(expected, FunctionType)):
        return False
    if not (function.__module__.startswith(HOME) and expected.__module__.startswith(HOME)):
        return False  # another package has replaced it for all models
    a, b = function.__code__, expected.__code__
    constants = [tuple(c for c in f.__code__.co_consts if c != f.__doc__) for f in (function, expected)]
    return (
        (a.co_code, a.co_names) == (b.co_code, b.co_names)
        and constants[0] == constants[1]
        and function.__defaults__ == expected.__defaults__
    )


def _global(function: object, name: str) -> Any:
    """Return the global that a function uses by ``name``; None if it uses none."""
    named = isinstance(function, FunctionType) and name in function.__code__.co_names
    return function.__globals__.get(name) if named and isinstance(function, FunctionType) else None


def _can_fuse(*tensors: Tensor) -> bool:
    first = tensors[0]
    backend = BACKENDS.get((first.device.type, first.dtype))
    return (
        not torch.compiler.is_compiling()
        and backend is not None
        and all(type(t) in (Tensor, nn.Parameter) and t.dtype == first.dtype for t in tensors)
        and all(t.device == first.device for t in tensors)
        and dispatch.usable(backend, first.device)
    )


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not _can_fuse(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _gated_unit(self: Any, x: Tensor) -> Tensor:
    activation = self.act_fn
    if torch.compiler.is_compiling() or activation._forward_hooks or activation._forward_pre_hooks:
        return type(self).forward(self, x)
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj(silu_mul(gate, up) if _can_fuse(gate, up) else activation(gate) * up)


def _with_global(forward: FunctionType, turned: Callable[..., Any]) -> FunctionType:
    """Return ``forward`` with another rotary embedding; one that decorators wrap is replaced within these."""
    inner = getattr(forward, "__wrapped__", None)
    namespace, closure = forward.__globals__, forward.__closure__
    if isinstance(inner, FunctionType):
        replaced = CellType(_with_global(inner, turned))
        closure = tuple(replaced if cell.cell_contents is inner else cell for cell in closure or ())
    else:
        namespace = {**namespace, ROTARY: turned}
    copied = FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _with_turning(forward: FunctionType, plain: Any) -> Callable[..., Any]:
    """Return an attention's ``forward`` that calls our rotary embedding by the name of the ``plain`` one."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        fits = unsqueeze_dim == 1 and cos.shape[-1] == q.shape[-1] and not (cos.requires_grad or sin.requires_grad)
        if not fits or not _can_fuse(q, k, cos, sin):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotate(q, k, cos, sin)

    fused = _with_global(forward, turned)

    @functools.wraps(forward)
    def attention(self: Any, *args: Any, **kwargs: Any) -> Any:
        # a compiler looks a function's globals up in its module
        return (forward if torch.compiler.is_compiling() else fused)(self, *args, **kwargs)

    return attention
