"""The keys of a run's configuration by their dotted names, with types and defaults as TOML writes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeGuard, get_args, get_origin

from pydantic import BaseModel

from ..settings import Section, TrainConfig

MAX_SHOWN = 200
"""Largest number of characters of the user's text in an error message."""


class ConfigKey(NamedTuple):
    """One documented key of the configuration."""

    key: str
    """Dotted name, such as ``trainer.lr``; a key of the list `data.tasks` is ``data.tasks.name``."""
    type: str
    default: str
    """Default value as TOML; empty if there is none."""
    doc: str


def config_keys(section: type[BaseModel] | None = None, prefix: str = "") -> Iterator[ConfigKey]:
    """Yield every key of the configuration, in the order of the fields."""
    for name, field in (section or TrainConfig).model_fields.items():
        inner = _without_none(field.annotation)
        if _is_section(inner):
            if inner is not field.annotation:  # an optional table is a key of its own, as `{}` asks for its defaults
                yield ConfigKey(f"{prefix}{name}", "table", "", " ".join((field.description or "").split()))
            yield from config_keys(inner, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        doc = " ".join((field.description or "").split())
        yield ConfigKey(f"{prefix}{name}", _type_name(inner), "" if default is None else toml_value(default), doc)
        if get_origin(inner) is tuple and _is_section(item := get_args(inner)[0]):
            yield from config_keys(item, f"{prefix}{name}.")


def nearest(key: str) -> str:
    """Return 'the nearest is `trainer.lr`': the same name in another table if there is one, else the best match."""
    keys = [k.key for k in config_keys()]
    key = key[:MAX_SHOWN]  # comparing takes time quadratic in its length
    leaf = key.rpartition(".")[2]
    same_leaf = sorted((k for k in keys if k.rpartition(".")[2] == leaf), key=lambda k: k.count("."))
    tables = {k.partition(".")[0]: k for k in reversed(keys) if "." in k}  # with the first key of each
    table = [] if "." in key else [tables[name] for name in difflib.get_close_matches(key, tables, n=1, cutoff=0.8)]
    near = same_leaf or table or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        by_leaf = {k.rpartition(".")[2]: k for k in reversed(keys)}
        near = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.0)]
    return f"the nearest is `{near[0]}`"


def required(section: type[BaseModel] | None = None, prefix: str = "") -> Iterator[str]:
    """Yield the keys that every run must give."""
    for name, field in (section or TrainConfig).model_fields.items():
        if _is_section(field.annotation):
            yield from required(field.annotation, f"{prefix}{name}.")
        elif field.is_required():
            yield f"{prefix}{name}"


def _without_none(annotation: Any) -> Any:
    """Return the section ``X`` of ``X | None``, and any other annotation unchanged."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and type(None) in get_args(annotation) and _is_section(kinds[0]) else annotation


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def toml_value(value: Any) -> str:
    """Format ``value`` as in a TOML file, on one line."""
    if isinstance(value, BaseModel | dict):
        return "{...}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _type_name(annotation: Any) -> str:
    """Name a type: integer, number, string, boolean, table, list of ..., or the allowed values."""
    plain = {int: "integer", float: "number", str: "string", bool: "boolean"}
    if annotation in plain:
        return plain[annotation]
    origin, args = get_origin(annotation), [a for a in get_args(annotation) if a is not type(None)]
    if origin is Literal:
        return " | ".join(json.dumps(a) for a in args)
    if origin in (tuple, list):
        return "list of tables" if _is_section(args[0]) else f"list of {_type_name(args[0])}s"
    if origin is dict:
        return "table"
    return _type_name(args[0])  # Annotated[...] or ... | None
