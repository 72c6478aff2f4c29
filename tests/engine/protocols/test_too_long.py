"""Requests longer than the context are refused in the words and by the code that clients look for, in each protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from rolltree.engine.app.server import make_app
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams, TooLongError

from ...support.agents import agent, job, run
from ...support.serving import make_engine, model, tokenizer

CACHE = 320
"""Tokens of the KV cache; the model has 512 positions."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LENGTH = {"/v1/responses": "max_output_tokens"}


def asked(path: str, characters: int, most: int) -> dict[str, Any]:
    said = "x" * characters
    talk = {"messages": [{"role": "user", "content": said}]}
    own = {"/v1/completions": {"prompt": said}, "/v1/responses": {"input": said}}.get(path, talk)
    return {**own, LENGTH.get(path, "max_tokens"): most}


@pytest.fixture(scope="module", params=["positions", "cache"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[TestClient, int]]:
    """A client, and the length of the context."""
    kv_tokens, limit = {"positions": (4096, 512), "cache": (CACHE, CACHE)}[request.param]
    engine = NativeEngine(model(), tokenizer(), EngineConfig(page_size=4, kv_tokens=kv_tokens))
    with TestClient(make_app(engine, "tiny"), raise_server_exceptions=False) as client:
        yield client, limit


def check(path: str, answer: httpx.Response, limit: int) -> None:
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()["error"]
    assert found["type"] == "invalid_request_error"
    if path == "/v1/messages":
        said = re.search(r"^prompt is too long: (\d+) tokens > (\d+) maximum", found["message"])
        assert said is not None, found["message"]
        read, most = map(int, said.groups())
        assert read > most
        both = re.search(r"`max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", found["message"])
        assert most == limit if both is None else int(both[1]) + int(both[2]) > int(both[3]) == limit
        return
    assert found["code"] == "context_length_exceeded"
    said = re.search(
        r"^This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens \((\d+) in the "
        r"messages, (\d+) in the completion\)\. Please reduce the length of the messages or completion\. ",
        found["message"],
    )
    assert said is not None, found["message"]
    total, both_, read, most = map(int, said.groups())
    assert (total, both_) == (limit, read + most)
    assert both_ > limit


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("characters", "most"), [(600, 4), (200, 400)])
def test_it_is_refused_by_the_protocols_own_words(
    served: tuple[TestClient, int], path: str, characters: int, most: int
) -> None:
    client, limit = served
    for more in ({}, {"stream": True}, {"temperature": 0}):
        check(path, client.post(path, json=asked(path, characters, most) | more), limit)
    if path != "/v1/completions":
        parameters = {"type": "object", "properties": {}}
        function = {"name": "f", "description": "Does it.", "parameters": parameters}
        shown = {"type": "function", "function": function}
        shown = {"type": "function", **function} if path == "/v1/responses" else shown
        shown = {"name": "f", "input_schema": parameters} if path == "/v1/messages" else shown
        check(path, client.post(path, json=asked(path, characters, most) | {"tools": [shown]}), limit)


def test_a_prompt_alone_is_too_long(served: tuple[TestClient, int]) -> None:
    client, limit = served
    body = asked("/v1/chat/completions", 600, 1)
    del body["max_tokens"]
    check("/v1/chat/completions", client.post("/v1/chat/completions", json=body), limit)
    counted = client.post("/v1/messages/count_tokens", json={"messages": body["messages"]})
    assert counted.json()["input_tokens"] > 600  # a client counts to know how much is to go
    if limit == 512:  # what is scored is not in the cache
        echo = {"prompt": "x" * 600, "max_tokens": 0, "echo": True, "logprobs": 1}
        check("/v1/completions", client.post("/v1/completions", json=echo), limit)


def test_the_error_has_the_lengths() -> None:
    """The limit of a cache whose pages the two share badly is what this prompt leaves of it."""
    engine = NativeEngine(model(), tokenizer(), EngineConfig(page_size=16, kv_tokens=64))
    for prompt, most, limit in ((70, 1, 64), (60, 10, 64), (33, 20, 49), (33, 16, None)):
        params = SamplingParams(n=1, max_new_tokens=most)
        if limit is None:
            engine.abort(engine.submit([[5] * prompt], params))
            continue
        with pytest.raises(TooLongError) as wrong:
            engine.submit([[5] * prompt], params)
        assert (wrong.value.prompt, wrong.value.max_tokens, wrong.value.limit) == (prompt, most, limit)


def test_a_response_that_outgrows_the_cache_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the cache holds the prompt in pieces, which no check before sampling knows."""
    engine = NativeEngine(model(), tokenizer(), EngineConfig(page_size=4, kv_tokens=64))
    monkeypatch.setattr(engine, "_check_length", lambda *_: None)
    body = {"prompt": "x" * 20, "max_tokens": 100, "ignore_eos": True}
    with TestClient(make_app(engine, "tiny")) as client:
        refused = client.post("/v1/completions", json=body)
        check("/v1/completions", refused, 64)
        streamed = client.post("/v1/completions", json=body | {"stream": True}).text
    told = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert told[-1]["error"]["code"] == "context_length_exceeded"
    assert streamed.endswith("data: [DONE]\n\n")


AGENT = """
import openai

def solve(task, client):
    messages = [{"role": "user", "content": "x" * 600}]
    try:
        client.chat.completions.create(model="m", messages=messages)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
        assert "This model's maximum context length is" in error.message, error
    try:
        client.post("/messages", body={"max_tokens": 4, "messages": messages}, cast_to=object)
    except openai.BadRequestError as error:
        assert "prompt is too long: " in str(error), error
    return 1.0
"""


@pytest.mark.parametrize("kv_tokens", [16384, 400])
def test_an_agent_is_told_so(tmp_path: Path, kv_tokens: int) -> None:
    """By the run's budget or by the engine's cache; its episodes end as cut."""
    engine = make_engine()
    if kv_tokens == 400:
        engine = NativeEngine(model(), engine.tokenizer, EngineConfig(page_size=4, kv_tokens=kv_tokens))
    engine.model.config.max_position_embeddings = 4096
    most = 160 if kv_tokens == 16384 else 2000
    tree = run(engine, job(engine, max_new_tokens=most), agent=agent(tmp_path, AGENT))
    assert set(tree.status.tolist()) == {LeafStatus.FAILED}  # no call was answered
    room = "leaves no room for an answer" if kv_tokens == 16384 else "cannot fit into the KV cache"
    for why in tree.meta["errors"].values():
        assert "made no call that was answered; the first was refused: " in why
        assert room in why
