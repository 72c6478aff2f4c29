"""Converts values to JSON and tensors and back, to store unfinished groups in a checkpoint. Nothing is pickled."""

from __future__ import annotations

import datetime
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import Tensor

from ..data.media import Picture
from ..data.segment import LeafStatus, Origin
from ..data.stored import StoredTexts, StoredTree
from ..data.tree import TokenTree
from ..programs import Given, SegmentReport
from ..rewards import RewardResult
from ..rollout.records import sample_dtype
from .group import Responses
from .prompts import Prompt

Json = Any


class NotKeptError(TypeError):
    """A value that a checkpoint cannot hold."""


class Archive:
    """Packs values into JSON and ``tensors``, and unpacks them.

    None, booleans, numbers, texts and lists are themselves in JSON; all other values are ``{name: content}``, as
    `FORMS` says. All come back equal, with the same types. A picture is stored once, however many prompts show it.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {} if tensors is None else tensors
        self.pictures: dict[str, Picture] = {}  # unpacked ones, by digest

    def pack(self, value: Any) -> Json:
        """Return ``value`` as JSON; arrays go into ``tensors``.

        Raises:
            NotKeptError: the value, or one in it, is of another type.
        """
        if isinstance(value, StoredTree | StoredTexts):
            value = value.whole() if isinstance(value, StoredTree) else list(value)
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return self.pack_all(value)
        name = _name_of_form(value)
        if name is None:
            raise NotKeptError(f"A {kind.__name__} cannot be kept in a checkpoint.")
        return {name: FORMS[name].write(self, value)}

    def unpack(self, packed: Json) -> Any:
        """Return the value from which `pack` made ``packed``."""
        if isinstance(packed, list):
            return self.unpack_all(packed)
        if not isinstance(packed, dict):
            return packed
        ((name, content),) = packed.items()
        return FORMS[name].read(self, content)

    def pack_all(self, values: Iterable[Any]) -> list[Json]:
        return [self.pack(value) for value in values]

    def unpack_all(self, packed: Iterable[Json]) -> list[Any]:
        return [self.unpack(value) for value in packed]


@dataclass(frozen=True)
class Form:
    """The content of a type's values in JSON; ``read`` undoes ``write``."""

    kind: type | None  # None: see `_name_of_form`
    write: Callable[[Archive, Any], Json]
    read: Callable[[Archive, Json], Any]


# -- values that hold others, which the archive packs -----------------------------------------------------------------


def _container(kind: Any) -> Form:
    return Form(kind, Archive.pack_all, lambda archive, content: kind(archive.unpack_all(content)))


def _mapping(kind: Any) -> Form:
    return Form(
        kind,
        lambda archive, value: [archive.pack_all(pair) for pair in value.items()],
        lambda archive, content: kind({archive.unpack(key): archive.unpack(value) for key, value in content}),
    )


def _record(kind: Any) -> Form:
    """Return the form of a dataclass."""
    return Form(
        kind,
        lambda archive, value: {field.name: archive.pack(getattr(value, field.name)) for field in fields(value)},
        lambda archive, content: kind(**{name: archive.unpack(value) for name, value in content.items()}),
    )


# -- values that hold no others ---------------------------------------------------------------------------------------


def _plain(kind: type | None, write: Callable[[Any], Json], read: Callable[[Json], Any]) -> Form:
    return Form(kind, lambda archive, value: write(value), lambda archive, content: read(content))


def _read_datetime(content: Json) -> datetime.datetime:
    text, fold, zone = content
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone_of(zone))


def _read_timestamp(content: Json) -> Any:
    import pandas  # pyarrow gives its types for columns in nanoseconds

    nanoseconds, zone = content
    return pandas.Timestamp(nanoseconds, unit="ns", **({} if zone is None else {"tz": _zone_of(zone)}))


def _read_timedelta(content: Json) -> Any:
    import pandas

    return pandas.Timedelta(content[0], unit="ns")


def _write_zone(moment: datetime.datetime) -> Json:
    """Return the moment's time zone: None, seconds from UTC, or a key of the time zone database."""
    zone = moment.tzinfo
    if zone is None or isinstance(zone, datetime.timezone):
        offset = moment.utcoffset()
        return None if offset is None else offset.total_seconds()
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    raise NotKeptError(f"A time with a {type(zone).__module__} zone cannot be kept in a checkpoint.")


def _zone_of(content: Json) -> datetime.tzinfo | None:
    if content is None or isinstance(content, str):
        return None if content is None else ZoneInfo(content)
    return datetime.timezone(datetime.timedelta(seconds=content))


def _write_generator(generator: np.random.Generator) -> Json:
    if not isinstance(generator.bit_generator, np.random.PCG64):
        raise NotKeptError("A Generator cannot be kept in a checkpoint.")
    return generator.bit_generator.state


def _read_generator(content: Json) -> np.random.Generator:
    generator = np.random.Generator(np.random.PCG64())
    generator.bit_generator.state = content
    return generator


# -- values whose numbers are tensors of the archive ------------------------------------------------------------------


def _store(archive: Archive, tensor: Tensor) -> str:
    name = f"{len(archive.tensors):06d}"
    archive.tensors[name] = tensor
    return name


def _write_array(archive: Archive, array: np.ndarray[Any, Any]) -> Json:
    if array.dtype.kind not in "biuf":
        raise NotKeptError(f"An array of {array.dtype} cannot be kept in a checkpoint.")
    return _store(archive, torch.from_numpy(np.ascontiguousarray(array).copy()))


def _read_array(archive: Archive, content: Json) -> np.ndarray[Any, Any]:
    return archive.tensors[content].numpy().copy()


def _write_records(archive: Archive, records: np.ndarray[Any, Any]) -> Json:
    top = records.dtype["top_id"].shape[0] if "top_id" in (records.dtype.names or ()) else -1
    if top < 0 or records.dtype != sample_dtype(top):
        raise NotKeptError(f"An array of {records.dtype} cannot be kept in a checkpoint.")
    if not len(records):
        return [_store(archive, torch.zeros(0, dtype=torch.uint8)), top]
    return [_store(archive, torch.frombuffer(bytearray(records.tobytes()), dtype=torch.uint8)), top]


def _read_records(archive: Archive, content: Json) -> np.ndarray[Any, Any]:
    name, top = content
    stored = archive.tensors[name].numpy().tobytes()
    return np.frombuffer(stored, sample_dtype(top)).copy() if stored else np.zeros(0, sample_dtype(top))


def _write_picture(archive: Archive, picture: Picture) -> Json:
    for name, values in picture.inputs.items():
        archive.tensors.setdefault(f"picture.{picture.digest}.{name}", torch.from_numpy(np.ascontiguousarray(values)))
    grid = None if picture.grid is None else [int(n) for n in picture.grid]
    return [picture.digest, sorted(picture.inputs), picture.rows, grid]


def _read_picture(archive: Archive, content: Json) -> Picture:
    digest, names, rows, grid = content
    if digest not in archive.pictures:
        inputs = {name: archive.tensors[f"picture.{digest}.{name}"].numpy().copy() for name in names}
        archive.pictures[digest] = Picture(inputs, rows, None if grid is None else (grid[0], grid[1], grid[2]), digest)
    return archive.pictures[digest]


# -- all types --------------------------------------------------------------------------------------------------------

FORMS: dict[str, Form] = {
    **{kind.__name__: _container(kind) for kind in (tuple, set, frozenset, deque)},
    **{kind.__name__: _mapping(kind) for kind in (dict, Counter)},
    **{k.__name__: _record(k) for k in (Given, Prompt, Responses, RewardResult, SegmentReport, TokenTree)},
    **{kind.__name__: _plain(kind, int, kind) for kind in (LeafStatus, Origin)},
    "bytes": _plain(bytes, bytes.hex, bytes.fromhex),
    "date": _plain(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": _plain(datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": _plain(
        datetime.timedelta,
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
        lambda content: datetime.timedelta(*content),
    ),
    "datetime": _plain(
        datetime.datetime,
        lambda moment: [moment.replace(tzinfo=None).isoformat(), moment.fold, _write_zone(moment)],
        _read_datetime,
    ),
    "Decimal": _plain(Decimal, str, Decimal),
    "UUID": _plain(UUID, str, UUID),
    "scalar": _plain(
        None,
        lambda scalar: [scalar.dtype.str, scalar.item()],
        lambda content: np.dtype(content[0]).type(content[1]),
    ),
    "Timestamp": _plain(None, lambda moment: [moment.value, _write_zone(moment)], _read_timestamp),
    "Timedelta": _plain(None, lambda delta: [delta.value, None], _read_timedelta),
    "Generator": _plain(np.random.Generator, _write_generator, _read_generator),
    "array": Form(None, _write_array, _read_array),
    "records": Form(None, _write_records, _read_records),
    "Picture": Form(Picture, _write_picture, _read_picture),
}
"""The forms by the names that stand in JSON: those of the types, but for numpy's."""
_NAMES = {form.kind: name for name, form in FORMS.items() if form.kind is not None}


def _name_of_form(value: Any) -> str | None:
    kind = type(value)
    if kind is np.ndarray:
        return "array" if value.dtype.names is None else "records"
    if isinstance(value, np.generic):
        return "scalar"
    if kind.__name__ in ("Timestamp", "Timedelta") and kind.__module__.partition(".")[0] == "pandas":
        return kind.__name__  # known without an import, as few files need pandas
    return _NAMES.get(kind)
