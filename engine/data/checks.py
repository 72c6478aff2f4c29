"""Checks of the values that trees are built from: converted to the trees' dtypes, never truncated or wrapped.

Every function raises ValueError with the argument's name (``name``) and the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def array_of(name: str, values: object) -> Array:
    """``values``, a list, an array or a tensor, as a numpy array."""
    torch: Any = sys.modules.get("torch")  # no tensor exists before it is imported, and the report is made without it
    if torch is not None and isinstance(values, torch.Tensor):
        tensor: Any = values
        if tensor.device.type == "meta":
            refuse(f"{name} is on the meta device and has no values; give a real tensor")
        tensor = tensor.detach().cpu()
        values = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        refuse(f"{name} must be numbers in one row, got {_shown(values)}")
    return array


def integers(name: str, values: object, *, dtype: npt.DTypeLike = np.int32, least: int | None = None) -> Array:
    """``values``, a number or ``[n]``, as integers of ``dtype``."""
    array = array_of(name, values)
    if not array.size:
        return array.astype(dtype)
    if array.dtype.kind not in "iu":
        refuse(f"{name} must be integers, got {array.dtype}; convert them where they are made")
    low, high = (np.iinfo(dtype).min if least is None else least), np.iinfo(dtype).max
    if array.min() < low or array.max() > high:
        refuse(f"{name} must be in {low}..{high}, got {array.min()}..{array.max()}")
    return array.astype(dtype)


def token_ids(name: str, values: object) -> Array:  # [n] int32
    ids = integers(name, values, least=0)
    if ids.ndim != 1:
        refuse(f"{name} must be a row of token ids [n], got shape {list(ids.shape)}")
    return ids


def numbers(name: str, values: object, *, nan: bool = False, least: float = -np.inf) -> Array:
    """``values`` as finite float32; with ``nan``, NaN means "none" and is allowed."""
    array = array_of(name, values)
    if array.dtype.kind == "b":
        refuse(f"{name} must be numbers, got bool")
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float32)
    good = np.isfinite(rounded) & (rounded >= least)
    if nan:
        good |= np.isnan(rounded)
    if not good.all():
        need = "finite in float32" + (", or NaN for none" if nan else "")
        bound = "" if least == -np.inf else f" and at least {least:g}"
        refuse(f"{name} must be {need}{bound}, got {array[~good][0]}")
    return rounded


def flags(name: str, values: object) -> Array:
    """``values`` as bool; 0 and 1 are allowed."""
    array = array_of(name, values)
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        refuse(f"{name} must be True or False, got {array[~np.isin(array, (0, 1))][0]}")
    return array.astype(np.bool_)


def codes(name: str, values: object, kind: type[IntEnum]) -> Array:
    """``values``, members of the IntEnum ``kind`` or their numbers, as int8."""
    array = integers(name, values, dtype=np.int64)
    if not np.isin(array, list(kind)).all():
        names = ", ".join(f"{member.value} ({member.name.lower()})" for member in kind)
        refuse(f"{name} must be {kind.__name__} values, {names}; got {array[~np.isin(array, list(kind))][0]}")
    return array.astype(np.int8)


def size(name: str, value: object, *, least: int = 1) -> int:
    """An integer of at least ``least``; no bool."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        refuse(f"{name} must be an integer of at least {least}, got {_shown(value)}")
    return int(value)


def count(name: str, values: object) -> int:
    """The number of entries of a list, array or tensor."""
    try:
        if not isinstance(values, str | bytes | Mapping | Set):
            return len(values)  # type: ignore[arg-type]
    except TypeError:
        pass
    refuse(f"{name} must be a list, got {_shown(values)}")


def all_of(name: str, values: object, kind: type) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(value, kind) for value in values):
        refuse(f"{name} must be a list of {kind.__name__}s, got {_shown(values)}")


def refuse(message: str) -> NoReturn:
    raise ValueError(f"{message}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]}..."
