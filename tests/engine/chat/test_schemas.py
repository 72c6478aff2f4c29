"""Arguments get the types that their schemas allow; JSON is read strictly."""

from __future__ import annotations

from typing import Any

import pytest

from rolltree.engine.chat.call_reading import checked
from rolltree.engine.chat.schemas import MalformedError, inlined, read_json, value_of

ROOT = {
    "$defs": {"Text": {"type": ["string", "null"]}, "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "array"}]}}
}
RIGHT: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "12", "12"),
    ({}, "12", "12"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
    ({"type": ["null", "string"]}, "null", None),
    ({"$ref": "#/$defs/Text"}, "[1]", "[1]"),
    ({"$ref": "#/$defs/Node"}, "[1]", [1]),
    ({"$ref": "#/$defs/none"}, "[1]", "[1]"),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, "7", 7),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"const": 3}, "3", 3),
    ({"type": "integer"}, "140.0", 140),
    ({"type": "number"}, "1.5", 1.5),
    ({"type": "boolean"}, "True", True),
    ({"type": "string", "nullable": True}, "null", None),
    ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "integer"]}, '"7"', '"7"'),
]
WRONG: list[tuple[Any, str]] = [
    ({"type": "integer"}, "140.5"), ({"type": "integer"}, "true"), ({"type": "integer"}, "null"),
    ({"type": "number"}, "NaN"), ({"type": "number"}, "1e999"), ({"type": "number"}, "false"),
    ({"type": "object"}, "[1]"), ({"type": "object"}, '{"a": Infinity}'), ({"type": "array"}, "['a']"),
    ({"enum": [1, 2]}, "x"), (False, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), RIGHT)
def test_a_bare_text_is_the_value_that_its_schema_allows(schema: Any, text: str, value: Any) -> None:
    found = value_of(text, schema, ROOT, "it")
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(("schema", "text"), WRONG)
def test_a_text_of_no_allowed_type_is_malformed_with_its_reason(schema: Any, text: str) -> None:
    with pytest.raises(MalformedError, match="it is no "):
        value_of(text, schema, ROOT, "it")


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999", '"\\ud800"', "[" * 100_000, "9" * 5000, "{'a': 1}"])
def test_what_json_does_not_have_is_not_read(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(text, whole=True)


def test_arguments_are_never_dropped() -> None:
    for right in (
        {"name": "f", "arguments": {"x": 1}},
        {"name": "f", "parameters": {"x": 1}},
        {"name": "f", "arguments": '{"x": 1}'},
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
    ):
        assert checked(right, {"f": {}}).arguments == {"x": 1}
    for none in ({"name": "f"}, {"name": "f", "arguments": None}, {"name": "f", "arguments": ""}):
        assert checked(none, {"f": {}}).arguments == {}
    for wrong, said in (
        ({"name": "f", "args": {"x": 1}}, "has 'args'; write its arguments as an object under 'arguments'"),
        ({"name": "f", "x": 1}, "has 'x'"),
        ({"name": "f", "arguments": {}, "parameters": {}}, "write them once"),
        ({"name": "f", "arguments": [1]}, "are no JSON object"),
        ({"name": "f", "arguments": "x"}, "a text that is no JSON object"),
        ({"name": "g"}, "^$"),
    ):
        with pytest.raises(MalformedError, match=said):
            checked(wrong, {"f": {}})


POINT = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Number"}}, "required": ["x"]}


@pytest.mark.parametrize(("schema", "inline"), [
    ({"properties": {"a": {"$ref": "#/$defs/Point", "description": "Where"}}, "$defs": {
        "Point": POINT, "Number": {"type": "number"}}},
     {"properties": {"a": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
                           "description": "Where"}}}),
    ({"properties": {"$ref": {"type": "string"}}}, {"properties": {"$ref": {"type": "string"}}}),
    ({"properties": {"a": {"anyOf": [{"$ref": "#/definitions/N"}, {"type": "null"}]}}, "definitions": {"N": {}}},
     {"properties": {"a": {"anyOf": [{}, {"type": "null"}]}}}),
])  # fmt: skip
def test_references_are_replaced_by_what_they_name(schema: dict[str, Any], inline: dict[str, Any]) -> None:
    assert inlined(schema) == inline


@pytest.mark.parametrize("schema", [
    {"properties": {"a": {"$ref": "#/$defs/No"}}, "$defs": {}},
    {"properties": {"a": {"$ref": "https://elsewhere/x"}}},
])  # fmt: skip
def test_references_that_lead_nowhere_stay(schema: dict[str, Any]) -> None:
    assert inlined(schema) == schema


def test_a_schema_in_itself_keeps_its_reference_and_definition() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}}
    shown = inlined({"properties": {"root": {"$ref": "#/$defs/Tree"}}, "$defs": {"Tree": tree}})
    assert shown["properties"]["root"] == tree
    assert shown["$defs"] == {"Tree": tree}
