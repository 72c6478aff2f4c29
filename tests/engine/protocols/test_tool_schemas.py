"""Calls that have to be made keep to their tools' schemas, and white space between the tokens of JSON is bounded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rolltree.engine.protocols.calls import read_call
from rolltree.engine.protocols.grammar import Grammars
from rolltree.engine.protocols.prompts import answer_schema

from ...support.serving import tokenizer

pytest.importorskip("llguidance")
WORDS = tokenizer()
GRAMMARS = Grammars(WORDS, 257)


def allows(schema: str, text: str) -> bool:
    """Return True if a grammar allows a text to its end, token for token."""
    grammar, ids = GRAMMARS.of_schema(schema, 1), [*WORDS(text)["input_ids"], WORDS.eos_token_id]
    return all(ids[i] in grammar(np.array(ids[:i], np.int32)) for i in range(len(ids)))


def schema_of(*tools: tuple[str, Any], choice: Any = "required") -> str:
    functions = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": functions, "tool_choice": choice}
    found = answer_schema(read_call("/v1/chat/completions", json.dumps(body).encode()).chat)
    assert found is not None
    return found


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def with_reference(reference: str, **more: Any) -> dict[str, Any]:
    """A tool whose ``p`` is "u", found by a reference."""
    return {"type": "object", "properties": {"p": {"$ref": reference}}, "required": ["p"], **more}


U = {"enum": ["u"]}
OTHER = with_reference("#/$defs/P", **{"$defs": {"P": {"enum": [1]}}})
DRAFT = "http://json-schema.org/draft-07/schema#"
CASES = {
    "$defs": with_reference("#/$defs/P", **{"$defs": {"P": U}}),
    "definitions": with_reference("#/definitions/P", definitions={"P": U}),
    "a draft": with_reference("#/definitions/P", definitions={"P": U}, **{"$schema": DRAFT}),
    "draft 4": with_reference("#/definitions/P", definitions={"P": U}, **{"$schema": DRAFT.replace("7", "4")}),
    "another place": with_reference("#/x/y/P", x={"y": {"P": U}}),
    "an anchor": with_reference("#P", **{"$defs": {"X": {"$anchor": "P", **U}}}),
    "an escape": with_reference("#/$defs/a~1b%20c", **{"$defs": {"a/b c": U}}),
    "two steps": with_reference("#/$defs/P", **{"$defs": {"P": {"$ref": "#/$defs/Q"}, "Q": U}}),
    "an address": with_reference("http://a.b/c#/$defs/P", **{"$defs": {"P": U}, "$id": "http://a.b/c"}),
    "the root": {"$ref": "#/$defs/R", "$defs": {"R": with_reference("#/$defs/P"), "P": U}},
}


@pytest.mark.parametrize("name", CASES)
def test_references_are_read_in_the_schema_of_their_tool(name: str) -> None:
    for tools in ((("f", CASES[name]), ("g", OTHER)), (("g", OTHER), ("f", CASES[name]))):
        schema = schema_of(*tools)
        assert allows(schema, call("f", p="u"))
        assert allows(schema, call("g", p=1))
        assert not allows(schema, call("f", p=1))
        assert not allows(schema, call("g", p="u"))
    assert allows(schema_of(("f", CASES[name])), '{"p": "u"}')
    named = {"type": "function", "function": {"name": "f"}}
    assert allows(schema_of(("g", OTHER), ("f", CASES[name]), choice=named), '{"p": "u"}')


def test_a_schema_refers_to_itself() -> None:
    own = {"type": "object", "properties": {"x": {"type": "boolean"}, "next": {"$ref": "#"}}, "required": ["x"]}
    own["additionalProperties"] = False
    schema = schema_of(("f", own), ("g", OTHER))
    assert allows(schema, call("f", x=True, next={"x": False}))
    assert not allows(schema, call("f", x=True, next={"name": "f", "arguments": {"x": True}}))


def test_what_is_named_like_a_reference_is_none() -> None:
    data = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/nowhere"}}}, "required": ["$ref"]}
    assert allows(schema_of(("f", data), ("g", OTHER)), call("f", **{"$ref": {"$ref": "#/nowhere"}}))


def test_two_tools_of_one_name_are_both_there() -> None:
    schema = schema_of(("f", CASES["$defs"]), ("f", OTHER))
    assert allows(schema, call("f", p="u"))
    assert allows(schema, call("f", p=1))


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {"x": {"type": "integer"}}}])
def test_arguments_are_an_object(parameters: Any) -> None:
    for schema, spelt in ((schema_of(("f", parameters)), "{}"), (schema_of(("f", parameters), ("g", {})), call("f"))):
        assert allows(schema, spelt)
        assert not allows(schema, spelt.replace("{}", "[1]"))


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "array"}, "The parameters of 'f' are of type 'array'; the arguments of a call are an 'object'."),
        (with_reference("http://a.b/c"), "The schema refers to 'http://a.b/c', which is not in it"),
        (with_reference("other.json#/P"), "other.json', which is not in it"),
        (with_reference("#/$defs/None"), "'/$defs/None' does not exist."),
        ({"$id": "http://a.b/c"}, "The parameters of 'f' and 'g' have one `$id`; leave it out."),
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "The schema is not supported: "),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_a_sentence(parameters: Any, said: str) -> None:
    other = {"$id": "http://a.b/c"} if "$id" in parameters else OTHER
    with pytest.raises(ValueError) as wrong:  # noqa: PT011
        GRAMMARS.of_schema(schema_of(("f", parameters), ("g", other)), 1)
    assert said in str(wrong.value)
    assert str(wrong.value).endswith(".")


PRETTY = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "object"}}, "b": {"type": "null"}}}


def test_white_space_between_tokens_is_bounded() -> None:
    schema = json.dumps(PRETTY)
    value = {"a": [{"x": [1, {"y": "z"}]}, {}], "b": None}
    for indent in (None, 1, 2, "\t", "   "):
        assert allows(schema, json.dumps(value, indent=indent))
    assert allows(schema, json.dumps(value, separators=(",", ":")))
    for before in ("  ", "\n\n", " \n", "\t", "\n" + " " * 17):
        assert not allows(schema, f'{{{before}"b": null}}')
    for text in (' {"b": null}', '{"b": null} ', "\n{}"):
        assert not allows(schema, text)


def test_texts_of_any_object_end() -> None:
    """Without a schema, runs of white space in texts are bounded; those of a schema hold anything."""
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    schema = answer_schema(read_call("/v1/chat/completions", json.dumps(body).encode()).chat)
    assert schema is not None
    for value in ({}, {"a": "b c  d", " ": {"x": [1.5e3, True, None, " " * 20, []]}}, {"a": "word " * 30}):
        assert allows(schema, json.dumps(value))
    for wrong in ({"a": " " * 21}, {" " * 21: 1}, [1], 1, "x"):
        assert not allows(schema, json.dumps(wrong))
    assert allows('{"type": "string"}', json.dumps(" " * 40))
