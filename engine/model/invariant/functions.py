"""Functions of torch that layers call, with results for a row that do not depend on the other rows.

PyTorch multiplies few rows in another order than many, and computes the last numbers of a tensor, or of a thread's
part of it, one by one and not as vectors, with another last bit of exponentials and the like. Within `fixed_order`,
products with a weight are `rolltree.kernels.linear`'s, and on a CPU tensors of such functions are padded to whole
vectors. A GPU computes every number of such a function in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rolltree.kernels.linear import linear

GRAIN = 32768
"""Numbers for which PyTorch starts a further thread."""
VECTORS = 64
"""Numbers of a step of PyTorch's loops over vectors, or a multiple: two vectors of 64 bytes of bf16."""


_within: ContextVar[bool] = ContextVar("rolltree_fixed_order", default=False)


@contextmanager
def fixed_order() -> Iterator[None]:
    """Within the block, functions of `REPLACED` compute each row by itself.

    Raises:
        ValueError: autocast is on where a product is computed.
    """
    if _within.get():
        yield
        return
    token = _within.set(True)
    try:
        with _Replacing():
            yield
    finally:
        _within.reset(token)


def within_fixed_order() -> bool:
    """Return whether the caller is within the block of a `fixed_order`."""
    # Compiled code never is: `install` refuses it. torch.compile cannot trace a ContextVar.
    return not torch.compiler.is_compiling() and _within.get()


class _Replacing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = REPLACED.get(func)
        if replaced is None:
            return func(*args, **(kwargs or {}))
        return replaced(func, *args, **(kwargs or {}))


def _fits(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type in ("cpu", "cuda") and x.dtype in (torch.float32, torch.bfloat16)


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled(weight.device.type):
        raise ValueError("Batch-invariant layers do not go with autocast; load the model in the dtype that it uses.")
    return linear(input, weight, bias) if _fits(weight) else func(input, weight, bias)


def _matmul(func: Any, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    """Multiply with a weight; other products are left to torch."""
    if _fits(right) and right.dim() == 2 and left.dim() >= 2 and not options:
        return _linear(func, left, right.T)
    return func(left, right, **options)


def _addmm(func: Any, bias: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    if _fits(right) and bias.dim() == 1 and not options:
        return _linear(func, left, right.T, bias)
    return func(bias, left, right, **options)


def _grouped_mm(func: Any, rows: Tensor, weights: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Multiply runs of rows with a weight each, [S, K] and [E, K, N], as experts do."""
    has_options = any(value is not None for value in options.values())
    if not _fits(weights) or offs is None or has_options or weights.dim() != 3 or rows.dim() != 2:
        return func(rows, weights, offs=offs, **options)
    ends = offs.tolist()
    parts = [
        _linear(func, rows[begin:end], weight.T) for begin, end, weight in zip([0, *ends], ends, weights, strict=False)
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def _by_vectors(func: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a function of numbers on so many that none is left over from whole vectors, in any thread."""
    if not _fits(x) or x.device.type != "cpu" or not x.numel():
        return func(x, *args, **kwargs)
    if kwargs.pop("inplace", False):
        return x.copy_(_by_vectors(func, x, *args, **kwargs))
    count = x.numel()
    padded = whole_vectors(count)
    if padded == count:
        return func(x.contiguous(), *args, **kwargs)
    return func(F.pad(x.reshape(-1), (0, padded - count)), *args, **kwargs)[:count].view(x.shape)


def whole_vectors(count: int) -> int:
    """Return the least number, not below ``count``, that PyTorch divides into whole vectors of every thread."""
    while True:
        threads = min(torch.get_num_threads(), -(-count // GRAIN))
        padded = -(-count // (VECTORS * threads)) * VECTORS * threads
        if padded == count:
            return count
        count = padded


OF_NUMBERS = (F.silu, F.gelu, F.softplus, F.mish, torch.sigmoid, Tensor.sigmoid, torch.rsqrt, Tensor.rsqrt)
"""Functions whose last bit depends on the place of a number; that of `exp`, `tanh`, `cos` and others does not."""
REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    torch.addmm: _addmm,
    torch._grouped_mm: _grouped_mm,
    **dict.fromkeys(OF_NUMBERS, _by_vectors),
}
"""Functions of torch, and what computes them within `fixed_order`, given the function itself and its arguments."""
