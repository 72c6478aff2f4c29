"""The kernels that a GPU would launch: each operator of torch that computes, and each launch of a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "unsqueeze",
    "squeeze", "transpose", "t", "permute", "expand", "slice", "select", "split", "split_with_sizes", "alias", "detach",
    "as_strided", "flatten", "reshape", "_reshape_alias", "unbind", "lift_fresh", "chunk", "view_dtype",
}  # fmt: skip
"""Operators that launch nothing: views, and memory."""


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name.startswith("aten::") and name[6:] not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(compute: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels in order, of Triton's in its interpreter, whose own operators do not count."""
    from triton.runtime.interpreter import GridExecutor

    seen = _Launches()
    execute = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(seen.names)
        result = execute(self, *args, **kwargs)
        seen.names[before:] = [self.fn.__name__]
        return result

    with mock.patch.object(GridExecutor, "__call__", launched), seen, torch.no_grad():
        compute()
    return seen.names
