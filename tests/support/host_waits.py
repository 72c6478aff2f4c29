"""A mode that lists the calls in which the host would wait for a device, for code run on tensors without data.

Tensors on the meta device stand for those of a GPU. Most calls that need a value raise on them; those that would give a
wrong answer instead are in `WAITS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
}  # fmt: skip


class HostWaits(TorchDispatchMode):
    """``calls``: names of the operations that need a value of a meta tensor on the host.

    Args:
        value: what every number fetched to the host is taken to be; None: a run ends where it needs one.
    """

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # whose calls arrive before they are taken apart
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        name = func._schema.name
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in given):
            target = kwargs.get("device")
            moved = name == "aten::_to_copy" and target is not None
            to_host = moved and torch.device(target).type == "cpu"
            copied = name == "aten::copy_" and not args[0].is_meta
            by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
                t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
            )
            counted = name == "aten::repeat_interleave" and kwargs.get("output_size") is None
            if name in WAITS or to_host or copied or by_mask or counted:
                self.calls.append(name)
                if to_host and self.value is not None:
                    return torch.full(args[0].shape, self.value, dtype=kwargs.get("dtype") or args[0].dtype)
            elif (
                name == "aten::copy_"
                and not args[1].is_meta
                and not (kwargs.get("non_blocking") or args[2:] == (True,))
            ):
                self.calls.append(f"{name}, blocking")
        elif name == "aten::_to_copy" and not kwargs.get("non_blocking") and _is_meta(kwargs.get("device")):
            self.calls.append(f"{name}, blocking")  # it waits for what the device was given before
        return func(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def waits(run: Callable[[], Any], value: float | None = None) -> list[str]:
    """Return the calls in which ``run`` makes the host wait, up to the first that cannot go on without a value."""
    with HostWaits(value) as seen:
        try:
            run()
        except (RuntimeError, NotImplementedError):
            if not seen.calls:
                raise
    return seen.calls
