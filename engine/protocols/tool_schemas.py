"""The JSON schemas of calls that an answer has to make.

References are read in the schema of their own tool, wherever it stands in the answer's: each is a resource with an
address (`$id`), so that ``#``, ``#/$defs/X`` and ``#X`` mean what they do alone, and tools may define one name twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]


def arguments_schema(name: str, parameters: Schema | None) -> Schema:
    """Return the schema of the arguments of a call: those parameters, and an object.

    Raises:
        ValueError: the parameters are of another type.
    """
    kind = (parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"The parameters of '{name}' are of type {kind!r}; the arguments of a call are an 'object'.")
    return {**(parameters or {}), "type": "object"}


def one_of(tools: Sequence[tuple[str, Schema | None]]) -> Schema:
    """Return the schema of a call of one of several tools: an object with ``name`` and ``arguments``.

    Raises:
        ValueError: the parameters of one are no object, or two have one address.
    """
    schemas = [(name, arguments_schema(name, parameters)) for name, parameters in tools]
    drafts = {str(schema["$schema"]) for _, schema in schemas if "$schema" in schema}
    draft = {"$schema": drafts.pop()} if len(drafts) == 1 else {}  # one generator has made them
    key = "id" if "draft-04" in draft.get("$schema", "") else "$id"
    names: dict[str, str] = {}
    for place, (name, schema) in enumerate(schemas):
        address = str(schema.setdefault(key, f"tool://{place}/"))
        if address in names:
            raise ValueError(f"The parameters of '{names[address]}' and '{name}' have one `{key}`; leave it out.")
        names[address] = name
    return draft | {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"enum": [name]}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in schemas
        ]
    }
