"""Transfers to and from a device, with as few host synchronisations as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def to_device(value: T, device: torch.device | str) -> T:
    """``value`` with all tensors in it on ``device``: in lists, tuples, dicts, dataclasses and bound arguments.

    Transfers from the host to a GPU use pinned memory and do not wait for the GPU.
    """
    return cast("T", _moved(value, torch.device(device)))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            return value.to(device)
        return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
    if isinstance(value, partial):
        bound = {name: _moved(v, device) for name, v in value.keywords.items()}
        return partial(value.func, *_moved(value.args, device), **bound)
    if isinstance(value, dict):
        return {key: _moved(v, device) for key, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [_moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value):
        before = {f.name: getattr(value, f.name) for f in fields(value)}
        changed = {name: now for name, v in before.items() if (now := _moved(v, device)) is not v}
        return replace(cast("Any", value), **changed) if changed else value
    return value


def fetch(values: Sequence[float | Tensor]) -> list[float]:
    """The values as Python numbers, with one transfer for all tensors."""
    tensors = [v.detach().reshape(()).double() for v in values if isinstance(v, Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(v, Tensor) else float(v) for v in values]
