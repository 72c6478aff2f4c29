"""The JSON types that a JSON schema allows, and JSON texts read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties")
OF_ARRAYS = ("items", "prefixItems")
DEFINITIONS = ("$defs", "definitions")
PYTHONS = {"True": "true", "False": "false", "None": "null"}
"""The names of JSON's constants in Python; templates in Jinja write them so."""


class MalformedError(ValueError):
    """A call that cannot be read; the message may be empty."""


def allowed_types(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the types of JSON values that ``schema`` allows; all of them where it says nothing.

    Args:
        root: the schema in which local references (``#/$defs/...``) are looked up; None: ``schema`` itself. A reference
            that is not there allows all.
    """
    resource = Resource.from_contents(schema if root is None else root, default_specification=DRAFT202012)
    return _allowed(schema, Registry().with_resource("", resource).resolver(), frozenset())


def _allowed(schema: Any, resolver: Any, seen: frozenset[str]) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else TYPES
    types = TYPES
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        types = frozenset(named if isinstance(named, list) else TYPES) & TYPES
        types |= {"integer"} & {"integer" for kind in types if kind == "number"}
    elif any(key in schema for key in OF_OBJECTS):
        types = frozenset({"object", "string"})  # of other types such a schema says nothing
    elif any(key in schema for key in OF_ARRAYS):
        types = frozenset({"array", "string"})
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()  # a schema among its own alternatives adds none
        try:
            target = resolver.lookup(reference)
        except (Unresolvable, ValueError):
            return types
        types &= _allowed(target.contents, target.resolver, seen | {reference})
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            types &= frozenset[str]().union(*(_allowed(part, resolver, seen) for part in parts))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        types &= _allowed(part, resolver, seen)
    if isinstance(schema.get("enum"), list):
        types &= _types_of(schema["enum"])
    if "const" in schema:
        types &= _types_of([schema["const"]])
    return types | {"null"} if schema.get("nullable") is True else types


def inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with what its local references (``#/$defs/...``) name in their places.

    A reference of a definition to itself stays, and its definition with it; so does one that is not there.
    """
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    stayed: set[str] = set()
    resolver = Registry().with_resource("", resource).resolver()
    shown = {key: value for key, value in schema.items() if key not in DEFINITIONS}
    whole: dict[str, Any] = _inlined(shown, resolver, (), stayed)
    return whole | ({key: schema[key] for key in DEFINITIONS if key in schema} if stayed else {})


def _inlined(part: Any, resolver: Any, seen: tuple[str, ...], stayed: set[str]) -> Any:
    if isinstance(part, list):
        return [_inlined(each, resolver, seen, stayed) for each in part]
    if not isinstance(part, Mapping):
        return part
    reference = part.get("$ref")
    if isinstance(reference, str):
        try:
            target = None if reference in seen else resolver.lookup(reference)
        except (Unresolvable, ValueError):
            target = None
        if target is None or not isinstance(target.contents, Mapping):
            stayed.add(reference)
        else:
            beside = {key: value for key, value in part.items() if key != "$ref"}
            inside = _inlined(target.contents, target.resolver, (*seen, reference), stayed)
            return inside | _inlined(beside, resolver, seen, stayed)
    return {key: _inlined(value, resolver, seen, stayed) for key, value in part.items()}


def _types_of(values: Iterable[Any]) -> frozenset[str]:
    return frozenset(kind for value in values for kind in ({"integer", "number"} if is_integer(value) else {of(value)}))


def of(value: Any) -> str:
    """Return the JSON type of a value; an integer is a number too."""
    kinds = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def is_integer(value: Any) -> bool:
    """Return True if a JSON value is a number without a fraction."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (isinstance(value, int) or value.is_integer())


def value_of(text: str, schema: Any, root: Any, what: str) -> Any:
    """Return the value that a bare text writes.

    It is the JSON value where the schema allows its type, else the text where it allows a text. A schema that allows
    all types says nothing of the value, so that it is the text. A text of JSON stays as it was written.

    Args:
        what: names the value in errors.

    Raises:
        MalformedError: the text is no value that the schema allows.
    """
    kinds = allowed_types(schema, root)
    if kinds == TYPES or kinds == {"string"}:
        return text
    try:
        value, _ = read_json(PYTHONS.get(text.strip(), text), whole=True)
    except ValueError:
        value = text
    if not isinstance(value, str):
        if is_integer(value) and "integer" in kinds and not ("number" in kinds and isinstance(value, float)):
            return int(value)
        if of(value) in kinds:
            return value
    if "string" in kinds:
        return text
    raise MalformedError(f"{what} is no {' or '.join(sorted(kinds)) or 'value at all'}: {text!r}")


# -- strict JSON ------------------------------------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise MalformedError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedError(f"the number {text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_BLANK = re.compile(r"\s*")


def read_json(text: str, at: int = 0, *, whole: bool = False) -> tuple[Any, int]:
    """Return the JSON value at ``at``, white space before it allowed, and where it ends.

    Args:
        whole: nothing but white space may follow.

    Raises:
        ValueError: there is none; a `MalformedError` names what JSON does not have: NaN, infinite numbers, half a
            character.
    """
    try:
        value, end = _DECODER.raw_decode(text, _BLANK.match(text, at).end())  # type: ignore[union-attr]
        if "\\u" in text[at:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedError("a text holds half a character (a lone surrogate)") from None
    except (RecursionError, MemoryError):
        raise ValueError("too many brackets") from None
    if whole and text[end:].strip():
        raise ValueError("more than one value")
    return value, end


def read_object(text: str) -> dict[str, Any]:
    """Return the JSON object that ``text`` is.

    Raises:
        ValueError: it is none.
    """
    value, _ = read_json(text, whole=True)
    if not isinstance(value, dict):
        raise MalformedError("that is no JSON object")
    return value
