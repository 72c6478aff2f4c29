"""Requests that nobody would make on purpose: tools, schemas, forced calls, stop texts and streams in every protocol.

None is answered by a 500, none by a stream without an end, and what is answered can be read. `make attack` makes 10,000
of each protocol.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..engine.agents.test_door import group
from ..support.agents import make_engine as make_agents_engine
from ..support.serving import in_thread, make_engine

pytest.importorskip("llguidance")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
LONE = "\ud800"  # travels as \\ud800

SCHEMAS: list[Any] = [
    {}, {"type": "object"}, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["a", 1, None]}}},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, {"$ref": "http://a.b/c"}, {"$ref": "#/no"},
    {"type": "array"}, {"type": ["object", "null"]}, {"type": "nothing"}, {"type": 5}, {"enum": []}, {"enum": [1, {}]},
    {"const": {}}, {"anyOf": []}, {"anyOf": [{"type": "object"}, {"type": "string"}]}, {"not": {}}, {"allOf": [False]},
    {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a{3}$"}}, "required": ["x"]},
    {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)("}}, "required": ["x"]},
    {"type": "object", "properties": {"": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": [""]},
    {"type": "object", "minProperties": 3, "maxProperties": 1}, {"type": "object", "properties": {"$ref": {}}},
    {"type": "object", "properties": {"x": {"minimum": 5, "maximum": 1, "type": "integer"}}, "required": ["x"]},
    {"type": "object", "properties": {"é\"\\\n": {"const": "\u0000"}}, "required": ["é\"\\\n"]}, {"$id": 5},
    {"$schema": 1}, {"properties": 5}, {"required": [1]}, {"type": "object", "required": ["x", "x"]},
    {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "boolean"}, "minItems": 9}}},
    {"type": "object", "patternProperties": {"[": {}}}, {"type": "object", "propertyNames": {"enum": ["a"]}},
    {"type": "object", "properties": {"x": {"format": "date-time", "type": "string"}}, "required": ["x"]},
]  # fmt: skip
NAMES = ["f", "g", "f", "a.b", "-", "", "x y", LONE, "n" * 129, 5, None]
STOPS: list[Any] = [
    None, [], "a", ["{", "}"], '"', "<end>", "<tool_call>", ["\n", " "], '"x', "1", "", [""], LONE, ["x"] * 70, 5,
]  # fmt: skip
TEXTS: list[Any] = [
    "hi", "go on", " ", "<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "\u0000", "é🙂",
    "<end>", "", LONE, None, 5, [], [{"type": "text", "text": "x"}], [{"type": "input_text", "text": "x"}],
    [{"type": "image"}], [5], {}, "x" * 700,
]  # fmt: skip
ROLES: list[Any] = ["user", "assistant", "system", "developer", "tool", "function", "", "nobody", None, 5]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 1e300, 10**30, "", "x", LONE, [], {}, [[]], {"a": None}, float("nan"),
]  # fmt: skip


class Requests:
    """Random requests of one protocol, most of them nearly right."""

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.rng = path, random.Random(f"{path} {seed}")
        self.calm = True

    def any(self, values: Any, right: int | None = None) -> Any:
        """Return one of the values, of which the first ``right`` are nothing odd."""
        return self.rng.choice(values[:right] if self.calm else values)

    def often(self, share: float) -> bool:
        return self.rng.random() < share

    def body(self) -> bytes:
        self.calm = self.often(0.7)
        body = self.conversation()
        body["max_output_tokens" if self.path == RESPONSES else "max_tokens"] = self.any([1, 5, 20, 60])
        if self.often(0.7):
            body["tools"] = [self.tool() for _ in range(self.any([0, 1, 1, 2, 3]))]
            if self.often(0.7):
                body["tool_choice"] = self.choice()
        if self.often(0.3):
            body["stop_sequences" if self.path == MESSAGES else "stop"] = self.any(STOPS, 10)
        if self.often(0.5):
            body["stream"] = True
        if self.often(0.3) and self.path != MESSAGES:
            self.form(body)
        for name, values in SAMPLING.get(self.path, {}).items() if self.often(0.5) else ():
            if self.often(0.2):
                body[name] = self.any(values, 2)
        while self.often(0.05 if self.calm else 0.3):
            self.spoil(body)
        raw = json.dumps(body).encode()
        return raw[: self.rng.randrange(len(raw))] if self.often(0.02) else raw

    def name(self) -> Any:
        return self.any(NAMES, 4)

    def schema(self) -> Any:
        return self.any(SCHEMAS[:6] if self.often(0.5) else SCHEMAS, 6)

    def tool(self) -> Any:
        own = {"name": self.name(), "description": "Does it."}
        if self.path == MESSAGES:
            return {**own, "input_schema": self.schema()}
        own["parameters"] = self.schema()
        if self.path == CHAT:
            return (
                {"type": "function", "function": own}
                if self.calm or self.often(0.9)
                else {"type": "custom", "custom": own}
            )
        if self.often(0.1):
            return {
                "type": "namespace",
                "name": self.name(),
                "tools": [{"type": "function", **own}],
            }
        return {"type": "function" if self.calm or self.often(0.9) else "web_search", **own}

    def choice(self) -> Any:
        if self.path == MESSAGES:
            kinds = [{"type": "any"}, {"type": "tool", "name": self.name()}, {"type": "auto"}, {"type": "none"}]
            return self.any([*kinds, {"type": "tool"}], 4)
        named = {"name": self.name()}
        named = {"function": named} if self.path == CHAT else named
        return self.any(["required", "required", {"type": "function", **named}, "auto", "none", "", {}], 5)

    def form(self, body: dict[str, Any]) -> None:
        schema = {"name": "x", "schema": self.schema()}
        if self.path == CHAT:
            kinds = [{"type": "json_object"}, {"type": "json_schema", "json_schema": schema}, {"type": "text"}]
            body["response_format"] = self.any(kinds)
        else:
            body["text"] = {"format": self.any([{"type": "json_object"}, {"type": "json_schema", **schema}])}

    def conversation(self) -> dict[str, Any]:
        text = self.any(TEXTS, 8)
        if self.path == RESPONSES:
            call = {"type": "function_call", "call_id": "c", "name": self.name(), "arguments": self.any(ARGUMENTS, 2)}
            result = {"type": "function_call_output", "call_id": "c", "output": self.any(TEXTS, 8)}
            items = [{"role": "user", "content": text}, *([call, result] if self.often(0.2) else [])]
            items += [{"role": self.any(ROLES, 4), "content": self.any(TEXTS, 8)}] if self.often(0.2) else []
            return {"input": self.any([text, items])}
        turns: list[Any] = [{"role": "user", "content": text}]
        if self.often(0.2):
            said = {"role": self.any(ROLES, 2), "content": self.any(TEXTS, 8)}
            turns += [said, {"role": "user", "content": "on"}]
        if self.often(0.2) and self.path == MESSAGES:
            use = {"type": "tool_use", "id": "c", "name": self.name(), "input": self.any([{}, {"x": 1}, None, 5], 2)}
            result = {"type": "tool_result", "tool_use_id": "c", "content": self.any(TEXTS, 8)}
            turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        elif self.often(0.2) and self.path == CHAT:
            call = {
                "id": "c",
                "type": "function",
                "function": {"name": self.name(), "arguments": self.any(ARGUMENTS, 2)},
            }
            turns += [
                {"role": "assistant", "content": self.any([None, "x"]), "tool_calls": self.any([[call], [], [5]], 1)}
            ]
            turns += [{"role": "tool", "tool_call_id": "c", "content": self.any(TEXTS, 8)}]
        return {"messages": turns}

    def spoil(self, value: Any) -> None:
        """Replace, take out or add something, at any depth."""
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = self.any(keys)
            if isinstance(value[key], dict | list) and value[key] and self.often(0.7):
                value[key] = json.loads(json.dumps(value[key]))  # what is shared is not changed
                value = value[key]
                continue
            if self.often(0.2) and isinstance(value, dict):
                value[self.any(["x", "", "type", "metadata", "n"])] = self.any(ODD)
            elif self.often(0.2):
                del value[key]
            else:
                value[key] = self.any(ODD)
            return


ARGUMENTS = ["{}", '{"x": 1}', "", "[]", "{", '{"x": NaN}', '"\\ud800"', "[" * 5000, "1" * 5000, 5, None]
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0, 0.01, 2, 1e30, -1], "top_p": [0.01, 1, 0, 2], "seed": [0, -1, 2**63, 2**64],
    "top_k": [1, 0, -1, 2**40], "min_p": [0.5, 1, 0], "parallel_tool_calls": [True, False],
}  # fmt: skip
SAMPLING: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **PARAMETERS, "n": [1, 2, 0, 5000], "logprobs": [True], "top_logprobs": [0, 3, 99], "ignore_eos": [True],
        "allowed_token_ids": [[], [5], [90, 92], list(range(257)), [300], [-1]], "stop_token_ids": [[5], [257], [256]],
        "logit_bias": [{"5": 100}, {"90": -100}, {"5": 3e38}, {"999": 1}, {"x": 1}, {"93": -1e38}],
        "stream_options": [{"include_usage": True}, {}], "return_token_ids": [True],
    },
    RESPONSES: PARAMETERS,
    MESSAGES: {"temperature": [0, 1, 9], "thinking": [{"type": "enabled", "budget_tokens": 5}, {}]},
}  # fmt: skip


def check(path: str, raw: bytes, answer: httpx.Response) -> str:
    """Check an answer, and return its kind."""
    said = answer.text
    assert answer.status_code in (200, 400, 404, 410, 429), (said, raw)
    assert "Traceback" not in said
    if answer.status_code != 200:
        told = read(said)["error"]
        assert told["type"] in ("invalid_request_error", "not_found_error", "rate_limit_error"), (said, raw)
        assert told["message"], raw
        return str(answer.status_code)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        whole = read(said)
        for arguments in calls_of(path, whole):
            assert isinstance(read(arguments) if isinstance(arguments, str) else arguments, dict), (said, raw)
        return "whole"
    events = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
    assert "server_error" not in said, (said[-500:], raw)
    assert "api_error" not in said, (said[-500:], raw)
    if path == CHAT:
        assert events.pop() == "[DONE]", (said[-500:], raw)
    last = [read(event) for event in events][-1]
    if path != CHAT:
        ends = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
        assert last["type"] in ends, (said[-500:], raw)
    return "streamed"


def read(spelt: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(spelt, parse_constant=refuse)


def calls_of(path: str, whole: Any) -> Iterator[Any]:
    """Yield the arguments of an answer's calls."""
    if path == RESPONSES:
        yield from (item["arguments"] for item in whole["output"] if item["type"] == "function_call")
    elif path == MESSAGES:
        yield from (block["input"] for block in whole["content"] if block["type"] == "tool_use")
    else:
        for choice in whole["choices"]:
            yield from (call["function"]["arguments"] for call in choice["message"].get("tool_calls") or [])


def attack(path: str, count: int, seed: int, ask: Callable[[bytes], httpx.Response]) -> Counter[str]:
    requests, seen = Requests(path, seed), Counter[str]()
    for _ in range(count):
        raw = requests.body()
        seen[check(path, raw, ask(raw))] += 1
    assert min(seen["whole"], seen["streamed"], seen["400"]) > 0, seen
    return seen


@contextmanager
def served(path: str) -> Iterator[Callable[[bytes], httpx.Response]]:
    headers = {"content-type": "application/json"}
    with in_thread(make_engine()) as url, httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        yield lambda raw: client.post(path, content=raw)
        health = client.get("/health").json()
        assert (health["status"], health["outstanding"]) == ("ok", 0)


@contextmanager
def at_the_door(path: str, folder: Path) -> Iterator[Callable[[bytes], httpx.Response]]:
    params = {"max_new_tokens": 400, "allowed_token_ids": None}
    with group(make_agents_engine(), folder, params=params) as opened:
        with opened.client() as client:
            yield lambda raw: client.post(path, content=raw)
        assert not opened.episodes[0].open
        assert opened.episodes[0].outage is None
        opened.end()


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", PATHS)
def test_no_request_breaks_the_server(path: str, cases: int) -> None:
    with served(path) as ask:
        print(attack(path, 5 * cases, 0, ask))


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", PATHS)
def test_no_request_breaks_the_door_of_agents(tmp_path: Path, path: str, cases: int) -> None:
    with at_the_door(path, tmp_path) as ask:
        print(attack(path, 5 * cases, 1, ask))


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_no_request_of_hundreds_breaks_either(tmp_path: Path, path: str) -> None:
    with served(path) as ask:
        attack(path, 150, 2, ask)
    with at_the_door(path, tmp_path) as ask:
        attack(path, 150, 3, ask)
