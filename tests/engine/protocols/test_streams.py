"""Responses through OpenAI's client and Anthropic's messages by their events: streams say what whole answers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from rolltree.engine.protocols.schema import Sampling
from rolltree.engine.rollout import NativeEngine

from ...support.serving import in_thread

Say = Callable[[str], None]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}
TOOL: Any = {"name": "look", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
SAID = [
    ("hello, w\u00f6rld", "hello, w\u00f6rld", 0),
    ("", "", 0),
    (CALL, "", 1),
    (f"Let me see. {CALL}", "Let me see.", 1),
    (f"{CALL}{CALL}", "", 2),
    (f"  {CALL}", "", 1),
    ("<tool_call>{no", "<tool_call>{no", 0),
    (f"a {CALL} b {CALL}", "a  b", 2),
]
"""Answers, with their content and the number of their calls."""


@pytest.fixture(scope="module")
def url(engine: NativeEngine) -> Iterator[str]:
    with in_thread(engine) as url:
        yield url


@pytest.fixture
def say(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Have the model answer with a text, then end."""
    right = Sampling.sampling_params

    def fix(text: str) -> None:
        assert engine.tokenizer is not None
        ids: list[int] = [*engine.tokenizer(text)["input_ids"], 256]

        def only(response: Any) -> Any:
            return np.array(ids[len(response) : len(response) + 1])

        def params(body: Sampling, **more: Any) -> Any:
            return right(body, **{**more, "grammar": only})

        monkeypatch.setattr(Sampling, "sampling_params", params)

    return fix


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(("text", "content", "number"), SAID)
def test_responses_of_openais_client(url: str, say: Say, text: str, content: str, number: int) -> None:
    say(text)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "input": "hi", "tools": [FUNCTION], "max_output_tokens": 300}
    whole = client.responses.create(**asked)
    assert (whole.output_text, whole.status) == (content, "completed")
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look", {"x": 1})] * number
    assert len({call.call_id for call in calls}) == number
    assert whole.usage is not None
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert last.output_text == content
    assert [(i.name, i.arguments) for i in last.output if i.type == "function_call"] == [
        (call.name, call.arguments) for call in calls
    ]
    assert last.usage == whole.usage
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == content
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    assert added == [e.item.id for e in events if e.type == "response.output_item.done"]
    assert added == [item.id for item in last.output]
    # what was answered can be sent back as it is
    back = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in whole.output)]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
    heard = {"input": [*back, *outputs, {"role": "user", "content": "and?"}], "tools": [], "max_output_tokens": 2}
    assert client.responses.create(**asked | heard).status in ("incomplete", "completed")


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize(("text", "content", "number"), SAID)
def test_messages_by_their_events(url: str, say: Say, text: str, content: str, number: int) -> None:
    say(text)
    asked: Any = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with httpx.Client(base_url=url, timeout=60) as http:
        whole = http.post("/v1/messages", json=asked).json()
        events = read(http.post("/v1/messages", json=asked | {"stream": True}))
    texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
    calls = [(block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    assert ("".join(texts), calls) == (content, [("look", {"x": 1})] * number)
    assert whole["stop_reason"] == ("tool_use" if number else "end_turn")
    built = build(events)
    assert [(b.get("text"), b.get("name"), b.get("input")) for b in built["content"] if b.get("text") != ""] == [
        (b.get("text"), b.get("name"), b.get("input")) for b in whole["content"] if b.get("text") != ""
    ]
    assert (built["stop_reason"], built["usage"]) == (whole["stop_reason"], whole["usage"])


def read(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each names its type twice."""
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def build(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together as Anthropic describes it; an event out of order fails."""
    assert events[0]["type"] == "message_start"
    message, spelt = events[0]["message"], ""
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                spelt = ""
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                spelt += event["delta"]["partial_json"]
            case "content_block_stop":
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(spelt)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                raise AssertionError(other)
    assert events[-1]["type"] == "message_stop"
    return message


def test_ends_are_told(url: str, say: Say) -> None:
    say("one two three")
    messages = [{"role": "user", "content": "hi"}]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "one")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=3) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"
    with httpx.Client(base_url=url, timeout=60) as http:
        long = http.post("/v1/messages", json={"messages": messages, "max_tokens": 3}).json()
        assert (long["stop_reason"], long["content"]) == ("max_tokens", [{"type": "text", "text": "one"}])
        stopped = {"messages": messages, "max_tokens": 50, "stop_sequences": [" th", " tw"]}
        for built in (
            http.post("/v1/messages", json=stopped).json(),
            build(read(http.post("/v1/messages", json=stopped | {"stream": True}))),
        ):
            assert (built["stop_reason"], built["stop_sequence"]) == ("stop_sequence", " tw")
            assert built["content"] == [{"type": "text", "text": "one"}]


def test_tokens_are_counted_as_they_are_read(url: str) -> None:
    asked = {"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with httpx.Client(base_url=url, timeout=60) as http:
        counted = http.post("/v1/messages/count_tokens", json=asked).json()
        answered = http.post("/v1/messages", json=asked | {"max_tokens": 1}).json()
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}


def test_errors_reach_clients_in_their_own_form(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as `input`"):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        client.responses.create(model="other", input="x")
    with httpx.Client(base_url=url, timeout=60) as http:
        asked = {"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        wrong = http.post("/v1/messages", json=asked)
        assert (wrong.status_code, wrong.json()["type"]) == (404, "error")
        assert wrong.json()["error"]["type"] == "not_found_error"
        nowhere = http.get("/v1/messages/batches")
        assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
