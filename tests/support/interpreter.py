"""Triton's interpreter with products of one rounding, and without work whose outcome it drops or has had before.

Its ``dot`` is NumPy's, whose sums are BLAS's, and there the order in which a row's products are added depends on the
machine, the row's place in its tile and the other rows. On a GPU it does not, so here each sum is rounded once.

What it leaves out is most of its time:

* Every operation of integers is computed again in int64 for an overflow check, which only debug builds look at.
* A launch exchanges the language's functions for interpreted ones; every call of a kernel's function by another looks
  for them again among all members, in vain.
* Every tensor's shape, block's type and dtype of NumPy is made from nothing, though a kernel has a few of each.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class Launch:
    """Stands in for ``interpreter._patch_lang``: what is exchanged stays so until the launch ends."""

    def __init__(self) -> None:
        self.exchange = interpreter._patch_lang
        self.exchanged = set[int]()
        self.scope: Any = None

    def __call__(self, fn: FunctionType) -> Launch:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not modules <= self.exchanged or not modules:
            scope = self.exchange(fn)
            self.scope = self.scope or scope  # of what a launch calls, nothing was ever put back
            self.exchanged |= modules
        return self

    def restore(self) -> None:
        self.exchanged.clear()
        scope, self.scope = self.scope, None
        scope.restore()


def keep_what_was_made() -> None:
    """Send the first call of equal shapes and types through Triton's code and checks; the others reuse its result."""
    new_tensor, new_block, new_dtype = tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype
    shapes = dict[tuple[Any, ...], tuple[Any, Any]]()
    blocks = dict[tuple[Any, ...], dict[str, Any]]()
    dtypes = dict[str, Any]()

    def tensor(made: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in shapes:
            made.handle, made.type, made.dtype = handle, type, type.scalar
            made.shape, made.numel = shapes[sizes]
        else:
            new_tensor(made, handle, type)
            shapes[sizes] = made.shape, made.numel

    def block(made: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes, *map(type, sizes))  # 16.0, which is refused, equals 16
        if key in blocks:
            vars(made).update(blocks[key], element_ty=element_ty)
        else:
            new_block(made, element_ty, shape)
            blocks[key] = vars(made).copy()

    def np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = new_dtype(of)
        return dtypes[name]

    tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype = tensor, block, np_dtype


def round_sums_once() -> None:
    dot = interpreter.InterpreterBuilder.create_dot

    def once(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or min(a.data.itemsize, b.data.itemsize) == 1:
            return dot(builder, a, b, d, *options)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = once


def leave_out_what_is_dropped() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = Launch()
    keep_what_was_made()
