"""Converts values to JSON and tensors and back, to store unfinished groups in a checkpoint. Nothing is pickled."""

from __future__ import annotations

import datetime
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor

from ..data.media import Picture
from ..data.segment import LeafStatus, Origin
from ..data.tree import TokenTree
from ..programs import Given, SegmentReport
from ..rewards import RewardResult
from ..rollout.records import sample_dtype
from .group import Responses
from .prompts import Prompt

Json = Any
KEPT: dict[str, type] = {
    c.__name__: c for c in (Given, LeafStatus, Origin, Prompt, Responses, RewardResult, SegmentReport, TokenTree)
}
"""Classes whose objects can be stored, by name."""
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {c.__name__: c for c in (tuple, set, frozenset, deque)}
WRITTEN: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (lambda t: [t.days, t.seconds, t.microseconds], lambda parts: datetime.timedelta(*parts)),
    Decimal: (str, Decimal),
    UUID: (str, UUID),
}
"""Further types in columns of parquet files, with the functions that write and read them."""


class NotKeptError(TypeError):
    """A value that a checkpoint cannot hold."""


class Archive:
    """Packs values into JSON and ``tensors``, and unpacks them.

    None, booleans, numbers, texts, lists, tuples, sets, dicts of any keys, dates and times, numpy arrays (the engine's
    records too), numpy's default generators, pictures and the classes in `KEPT` and `WRITTEN` come back equal, with the
    same types. A picture is stored once, however many prompts and trees show it.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self._pictures: dict[str, Picture] = {}  # unpacked ones, by digest

    def pack(self, value: Any) -> Json:
        """Return ``value`` as JSON; arrays go into ``tensors``.

        Raises:
            NotKeptError: the value, or one in it, is of another type.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.pack(v) for v in value]
        if kind.__name__ in CONTAINERS and CONTAINERS[kind.__name__] is kind:
            return {kind.__name__: [self.pack(v) for v in value]}
        if kind in (dict, Counter):
            return {kind.__name__: [[self.pack(k), self.pack(v)] for k, v in value.items()]}
        if kind in WRITTEN:
            return {kind.__name__: WRITTEN[kind][0](value)}
        if kind is datetime.datetime:
            return {"datetime": [value.replace(tzinfo=None).isoformat(), value.fold, _zone(value)]}
        if kind.__name__ in ("Timestamp", "Timedelta") and kind.__module__.partition(".")[0] == "pandas":
            return {kind.__name__: [value.value, _zone(value) if kind.__name__ == "Timestamp" else None]}
        if kind is np.ndarray:
            return self._pack_array(value)
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.str, value.item()]}
        if kind is np.random.Generator and isinstance(value.bit_generator, np.random.PCG64):
            return {"Generator": value.bit_generator.state}
        if kind is Picture:
            return self._pack_picture(value)
        if KEPT.get(kind.__name__) is kind:
            if issubclass(kind, int):
                return {kind.__name__: int(value)}
            assert is_dataclass(value)
            return {kind.__name__: {f.name: self.pack(getattr(value, f.name)) for f in fields(value)}}
        raise NotKeptError(f"A {kind.__name__} cannot be kept in a checkpoint.")

    def unpack(self, packed: Json) -> Any:
        """Return the value from which `pack` made ``packed``."""
        if isinstance(packed, list):
            return [self.unpack(v) for v in packed]
        if not isinstance(packed, dict):
            return packed
        ((name, content),) = packed.items()
        if name in CONTAINERS:
            return CONTAINERS[name]([self.unpack(v) for v in content])
        if name in ("dict", "Counter"):
            pairs = {self.unpack(k): self.unpack(v) for k, v in content}
            return pairs if name == "dict" else Counter(pairs)
        if name in _READERS:
            return _READERS[name](content)
        if name == "datetime":
            return datetime.datetime.fromisoformat(content[0]).replace(fold=content[1], tzinfo=_made_zone(content[2]))
        if name in ("Timestamp", "Timedelta"):
            return _of_pandas(name, *content)
        if name == "array":
            return self.tensors[content].numpy().copy()
        if name == "records":
            stored = self.tensors[content[0]].numpy().tobytes()
            dtype = sample_dtype(content[1])
            return np.frombuffer(stored, dtype).copy() if stored else np.zeros(0, dtype)
        if name == "Picture":
            return self._unpack_picture(*content)
        if name == "scalar":
            return np.dtype(content[0]).type(content[1])
        if name == "Generator":
            generator = np.random.Generator(np.random.PCG64())
            generator.bit_generator.state = content
            return generator
        kind = KEPT[name]
        return kind(**{k: self.unpack(v) for k, v in content.items()}) if isinstance(content, dict) else kind(content)

    def _pack_array(self, array: np.ndarray[Any, Any]) -> Json:
        name = f"{len(self.tensors):06d}"
        if array.dtype.names is not None:
            top = array.dtype["top_id"].shape[0] if "top_id" in array.dtype.names else -1
            if top < 0 or array.dtype != sample_dtype(top):
                raise NotKeptError(f"An array of {array.dtype} cannot be kept in a checkpoint.")
            self.tensors[name] = (
                torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
                if len(array)
                else (torch.zeros(0, dtype=torch.uint8))
            )
            return {"records": [name, top]}
        if array.dtype.kind not in "biuf":
            raise NotKeptError(f"An array of {array.dtype} cannot be kept in a checkpoint.")
        self.tensors[name] = torch.from_numpy(np.ascontiguousarray(array).copy())
        return {"array": name}

    def _pack_picture(self, picture: Picture) -> Json:
        for name, values in picture.inputs.items():
            self.tensors.setdefault(f"picture.{picture.digest}.{name}", torch.from_numpy(np.ascontiguousarray(values)))
        grid = None if picture.grid is None else [int(n) for n in picture.grid]
        return {"Picture": [picture.digest, sorted(picture.inputs), picture.rows, grid]}

    def _unpack_picture(self, digest: str, names: list[str], rows: int, grid: list[int] | None) -> Picture:
        if digest not in self._pictures:
            inputs = {name: self.tensors[f"picture.{digest}.{name}"].numpy().copy() for name in names}
            places = None if grid is None else (grid[0], grid[1], grid[2])
            self._pictures[digest] = Picture(inputs, rows, places, digest)
        return self._pictures[digest]


_READERS = {kind.__name__: read for kind, (_, read) in WRITTEN.items()}


def _of_pandas(name: str, nanoseconds: int, zone: Json) -> Any:
    """Return a pandas.Timestamp or Timedelta, which pyarrow gives for columns in nanoseconds."""
    import pandas

    if name == "Timedelta" or zone is None:
        return getattr(pandas, name)(nanoseconds, unit="ns")
    return pandas.Timestamp(nanoseconds, unit="ns", tz=_made_zone(zone))


def _zone(moment: datetime.datetime) -> Json:
    """Return the moment's time zone: None, seconds from UTC, or a key of the time zone database."""
    zone = moment.tzinfo
    if zone is None or isinstance(zone, datetime.timezone):
        offset = moment.utcoffset()
        return None if offset is None else offset.total_seconds()
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    raise NotKeptError(f"A time with a {type(zone).__module__} zone cannot be kept in a checkpoint.")


def _made_zone(named: Json) -> datetime.tzinfo | None:
    if named is None or isinstance(named, str):
        return None if named is None else ZoneInfo(named)
    return datetime.timezone(datetime.timedelta(seconds=named))
