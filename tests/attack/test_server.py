"""The server against clients that send anything, hang up at any moment, or share it with others that do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltree.engine.protocols.schema import ChatBody, CompletionBody
from rolltree.engine.rollout import NativeEngine, SamplingParams

from ..support.serving import as_process, in_thread, make_engine, save

COMPLETION: dict[str, Any] = {"prompt": "ab", "max_tokens": 4, "seed": 1, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1, "ignore_eos": True}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wait", "parameters": {**SCHEMA, "properties": {"a": {"const": 1}}}}}


@pytest.fixture(scope="module")
def client(engine: NativeEngine) -> Iterator[httpx.Client]:
    with in_thread(engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()  # lone surrogates travel as \\ud800
    return client.post(path, content=raw, headers={"content-type": "application/json"})


def expect_well(client: httpx.Client, answer: httpx.Response) -> None:
    """An answer or a refusal in OpenAI's form, and a server that goes on."""
    assert answer.status_code in (200, 400, 404, 405, 413), answer.text
    if answer.status_code != 200:
        said = answer.json()["error"]
        assert said["message"]
        assert said["type"] == "invalid_request_error"
        assert "Traceback" not in said["message"]
    health = client.get("/health")
    assert health.status_code == 200, health.text
    assert health.json()["status"] == "ok"


# -- what has been found, one by one ----------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str]] = [
    ("/v1/completions", {"top_k": 3_000_000_000}, "top_k is 3000000000"),
    ("/v1/completions", {"top_k": -2}, "top_k is -2"),
    ("/v1/completions", {"n": 1_000_000}, "`n`"),
    ("/v1/completions", {"n": 1000, "prompt": [[5]] * 10}, "more than 4096 responses"),
    ("/v1/completions", {"stop": "\ud800"}, "Invalid JSON"),
    ("/v1/completions", {"prompt": "\ud800"}, "Invalid JSON"),
    ("/v1/completions", {"prompt": [2**31]}, "`prompt"),
    ("/v1/completions", {"prompt": [257]}, "outside the model's vocabulary"),
    ("/v1/completions", {"prompt": []}, "`prompt` is empty"),
    ("/v1/completions", {"prompt": ""}, "empty"),
    ("/v1/completions", {"prompt": [[5], []]}, "Prompt 1 is empty"),
    ("/v1/completions", {"seed": 2**64}, "seed is"),
    ("/v1/completions", {"seed": 10**400}, "seed"),
    ("/v1/completions", {"logit_bias": {"5": 1e300}}, "finite in float32"),
    ("/v1/completions", {"logit_bias": {"1000": 1}}, "outside the model's vocabulary"),
    ("/v1/completions", {"stop_token_ids": [1000]}, "outside the model's vocabulary"),
    ("/v1/completions", {"temperature": 1e-50}, "temperature"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', "temperature"),
    ("/v1/completions", {"max_tokens": 0}, "`max_tokens` is 0"),
    ("/v1/completions", {"best_of": 1, "n": 2}, "`best_of` is 1"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "`stream_options` needs"),
    ("/v1/completions", b"\xff\xfe", "Invalid JSON"),
    ("/v1/completions", b"", "Invalid JSON"),
    ("/v1/completions", b"[" * 100_000, "Invalid JSON"),
    ("/v1/completions", b"[]", "should be an object"),
    ("/v1/completions", b'{"prompt": "x"', "Invalid JSON"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "`messages.0.content` is missing"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "`messages.0.content.0` is of type 'image_url'; this model reads text parts only",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "Invalid JSON"),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}},
        "chat_template_kwargs.chat_template",
    ),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"tokenizer_kwargs": None}},
        "chat_template_kwargs.tokenizer_kwargs",
    ),
    ("/v1/chat/completions", {"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x"),
    ("/v1/chat/completions", {"top_logprobs": 2}, "needs `logprobs`"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "`tools` has none"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
]


@pytest.mark.parametrize(("path", "changes", "said"), REFUSED)
def test_what_cannot_be_done_is_refused_in_a_sentence(client: httpx.Client, path: str, changes: Any, said: str) -> None:
    answer = post(client, path, changes if isinstance(changes, bytes) else {**PATHS[path], **changes})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    expect_well(client, answer)


def test_other_paths_and_methods_are_refused_in_the_same_form(client: httpx.Client) -> None:
    for answer, code in ((client.get("/v1/none"), 404), (client.get("/v1/completions"), 405)):
        assert answer.status_code == code
        expect_well(client, answer)


# what clients of vLLM and OpenAI send without wanting anything by it
NO_OPS: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0], "presence_penalty": [0, 0.0], "repetition_penalty": [1, 1.0], "length_penalty": [1],
    "top_k": [0, -1], "top_p": [1, 1.0], "min_p": [0, 0.0], "n": [1], "best_of": [1], "use_beam_search": [False],
    "early_stopping": [False], "min_tokens": [0], "bad_words": [[]], "stop": [[]], "stop_token_ids": [[]],
    "logit_bias": [{}], "ignore_eos": [False], "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False], "include_stop_str_in_output": [False],
    "truncate_prompt_tokens": [None], "prompt_logprobs": [None], "priority": [0], "stream": [False],
    "response_format": [{"type": "text"}], "user": ["me"], "guided_json": [None], "vllm_xargs": [{}],
}  # fmt: skip
OF_CHAT: dict[str, list[Any]] = {
    "echo": [False], "add_generation_prompt": [True], "continue_final_message": [False], "add_special_tokens": [False],
    "documents": [[], None], "chat_template": [None], "store": [False], "service_tier": ["auto", "default"],
    "modalities": [["text"]], "reasoning_effort": [None], "logprobs": [False], "top_logprobs": [0],
}  # fmt: skip
OF_COMPLETIONS: dict[str, list[Any]] = {"echo": [False], "suffix": [""], "add_special_tokens": [True]}


@pytest.mark.parametrize("path", PATHS)
def test_options_that_change_nothing_are_accepted(client: httpx.Client, path: str) -> None:
    def say(**changes: Any) -> tuple[int, Any]:
        answer = post(client, path, {**PATHS[path], "seed": 3, **changes})
        return answer.status_code, [
            {k: v for k, v in choice.items() if k != "logprobs"} for choice in answer.json().get("choices", [])
        ]

    plain = say()
    assert plain[0] == 200
    own = OF_CHAT if "chat" in path else OF_COMPLETIONS
    for name, values in (NO_OPS | own).items():
        for value in values:
            assert say(**{name: value}) == plain, f"{name}={value!r}"


WANTED: list[tuple[str, Any]] = [
    ("repetition_penalty", 1.2), ("repetition_penalty", True), ("presence_penalty", -0.5), ("frequency_penalty", False),
    ("min_tokens", 3), ("use_beam_search", True), ("length_penalty", 0.8), ("early_stopping", True),
    ("bad_words", ["no"]), ("skip_special_tokens", False), ("spaces_between_special_tokens", "no"),
    ("include_stop_str_in_output", True), ("truncate_prompt_tokens", 8), ("prompt_logprobs", 0), ("priority", -1),
    ("guided_regex", "a+"), ("structured_outputs", {"regex": "a"}), ("cache_salt", "s"), ("vllm_xargs", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), WANTED)
def test_options_that_it_does_not_have_are_refused_by_name(
    client: httpx.Client, path: str, name: str, value: Any
) -> None:
    answer = post(client, path, {**PATHS[path], name: value})
    assert answer.status_code == 400, answer.text
    assert f"`{name}`: This server does not have it; leave it out" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [-2, 1.5, True, "50"])
def test_top_k_is_a_number_of_tokens_or_no_limit(client: httpx.Client, value: Any) -> None:
    answer = post(client, "/v1/completions", {**PATHS["/v1/completions"], "top_k": value})
    assert answer.status_code == 400
    assert "top_k" in answer.json()["error"]["message"]


def test_a_model_is_shown_by_its_name_and_no_other_is(client: httpx.Client) -> None:
    (listed,) = client.get("/v1/models").json()["data"]
    assert client.get(f"/v1/models/{listed['id']}").json() == listed
    for other in ("gpt-4o", "org/model", f"{listed['id']}/x", "%20", "..%2f.."):
        answer = client.get(f"/v1/models/{other}")
        assert answer.status_code == 404
        expect_well(client, answer)


def test_contents_in_parts_and_nulls_mean_what_openai_says(client: httpx.Client) -> None:
    def say(**changes: Any) -> str:
        answer = post(client, "/v1/chat/completions", {**CHAT, **changes})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert say(messages=[{"role": "user", "content": parts}]) == say(messages=[{"role": "user", "content": "h\ni"}])
    nulls = dict.fromkeys(("n", "temperature", "top_p", "stop", "stream", "tools", "tool_choice", "logprobs", "user"))
    assert say(**nulls) == say()
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    assert say(messages=[*CHAT["messages"], called]) == say(
        messages=[*CHAT["messages"], {"role": "assistant", "content": ""}]
    )


@pytest.mark.parametrize("filters", [{"temperature": 0}, {"top_k": 3}, {"top_p": 0.4, "temperature": 1.7}])
def test_log_probs_have_one_meaning_everywhere(
    client: httpx.Client, engine: NativeEngine, filters: dict[str, Any]
) -> None:
    """Log-probs of a token and of the likeliest ones, whole and in chunks, are the model's, as prompts are scored."""
    filters = {**filters, "allowed_token_ids": list(range(94))}  # a character each
    body = {**COMPLETION, **filters, "max_tokens": 12, "logprobs": 20, "return_token_ids": True}
    (choice,) = post(client, "/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    prompt = [*b"ab"]
    ids = engine.tokenizer("ab")["input_ids"] + choice["token_ids"]  # type: ignore[misc]
    expected = engine.prompt_logprobs(ids, 20)[len(prompt) - 1 :]
    assert found["token_logprobs"] == pytest.approx(expected["raw_logprob"].tolist(), abs=1e-4)
    for name, own, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert "\ufffd" in name or top.get(name, own) == own
        assert own <= max(top.values())
    chat = {**CHAT, **filters, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    engine.forget_prefixes()  # with them they may differ by rounding
    whole = post(client, "/v1/chat/completions", chat).json()["choices"][0]
    pieces: list[Any] = []
    engine.forget_prefixes()
    with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0])
    streamed = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole["message"]["content"]
    assert len(pieces[-1]["logprobs"]["content"] if pieces[-1]["logprobs"] else []) < 12
    assert sum(piece["logprobs"] is not None for piece in pieces) > 1  # on a busy machine tokens come several at once


def test_echo_scores_the_prompt_as_lm_eval_reads_it(client: httpx.Client, engine: NativeEngine) -> None:
    prompts = [engine.tokenizer(text)["input_ids"] for text in ("abcd", "xy")]  # type: ignore[misc]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for choice, prompt in zip(post(client, "/v1/completions", body).json()["choices"], prompts, strict=True):
        logprobs, tops = (choice["logprobs"][name][:-1] for name in ("token_logprobs", "top_logprobs"))
        expected = engine.prompt_logprobs(prompt, 1)
        assert logprobs[0] is tops[0] is None
        assert logprobs[1:] == pytest.approx(expected["raw_logprob"].tolist(), abs=1e-5)
        assert [max(top.values()) for top in tops[1:]] == pytest.approx(expected["top_raw"][:, 0].tolist(), abs=1e-5)
        assert choice["text"].startswith({4: "abcd", 2: "xy"}[len(prompt)])
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
    alone = post(client, "/v1/completions", {**body, "max_tokens": 0}).json()
    assert [choice["text"] for choice in alone["choices"]] == ["abcd", "xy"]
    assert alone["usage"]["completion_tokens"] == 0


def test_best_of_gives_the_likeliest(client: httpx.Client) -> None:
    body = {**COMPLETION, "logprobs": 0, "max_tokens": 6}
    every = post(client, "/v1/completions", {**body, "n": 5}).json()["choices"]
    best = post(client, "/v1/completions", {**body, "n": 2, "best_of": 5}).json()
    every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in every[:2]]
    assert best["usage"]["completion_tokens"] == 30


GRAMMAR = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance (extra: grammar)")


@GRAMMAR
def test_answers_keep_to_a_schema_and_tools_are_called(client: httpx.Client) -> None:
    body = {**CHAT, "max_tokens": 200, "n": 3, "ignore_eos": False, "temperature": 0.5}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for choice in post(client, "/v1/chat/completions", {**body, "response_format": form}).json()["choices"]:
        assert choice["finish_reason"] == "stop" or len(choice["message"]["content"]) > 50
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"a"}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        for tools in ([TOOL], [TOOL, OTHER]):
            asked = {
                **body,
                "tools": tools,
                "tool_choice": choice,
                "max_tokens": 60,
                "allowed_token_ids": [*range(94), 256],
            }
            answer = post(client, "/v1/chat/completions", asked)
            assert answer.status_code == 200, answer.text
            for got in answer.json()["choices"]:
                if got["finish_reason"] == "tool_calls":
                    (call,) = got["message"]["tool_calls"]
                    assert call["function"]["name"] in ("look", "wait")
                    assert set(json.loads(call["function"]["arguments"])) == {"a"}
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    answer = post(client, "/v1/chat/completions", {**body, "response_format": bad})
    assert "schema is not supported" in answer.json()["error"]["message"]
    expect_well(client, answer)


# -- anything at all --------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
surrogates = st.text(st.characters(categories=["Cs", "L", "So"]), max_size=4)
anything = st.recursive(
    scalars | surrogates,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    path = draw(st.sampled_from(sorted(PATHS)))
    kind = CompletionBody if path == "/v1/completions" else ChatBody
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=40) | anything.map(lambda x: json.dumps(x).encode()))
    names = sorted(kind.model_fields)
    changes = draw(st.dictionaries(st.sampled_from(names) | st.text(max_size=6), anything, max_size=3))
    raw = json.dumps({**PATHS[path], **changes}).encode()
    return path, raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


def test_any_body_is_answered_or_refused(client: httpx.Client, cases: int) -> None:
    def ask() -> str:
        return str(post(client, "/v1/completions", {**COMPLETION, "max_tokens": 8}).json()["choices"][0]["text"])

    alone = ask()

    @settings(max_examples=max(cases, 50), suppress_health_check=list(HealthCheck))
    @given(bodies())
    def attack(sent: tuple[str, Any]) -> None:
        expect_well(client, post(client, *sent))

    attack()
    assert ask() == alone


def hang_up(url: str, body: dict[str, Any], after: int, *, reset: bool) -> None:
    """Send a request, read some bytes of the answer, and be gone."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        if reset:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
        whole = head + raw
        if after < 0:
            wire.sendall(whole[: random.Random(after).randrange(len(whole))])
            return
        wire.sendall(whole)
        while after > 0 and (got := wire.recv(min(after, 4096))):
            after -= len(got)


def test_clients_that_hang_up_leave_nothing_behind(client: httpx.Client, engine: NativeEngine, cases: int) -> None:
    rng = random.Random(0)
    long = {**COMPLETION, "max_tokens": 400, "n": 3}
    url = str(client.base_url).rstrip("/")

    def leave(_: int) -> None:
        body = {**long, "stream": rng.random() < 0.5}
        after = rng.choice([-rng.randrange(1, 999), 0, *([1, 700] if body["stream"] else [])])
        hang_up(url, body, after, reset=rng.random() < 0.5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(cases)))
    for _ in range(400):
        if not engine.loop.busy and client.get("/health").json()["outstanding"] == 0:
            break
        time.sleep(0.05)
    assert client.get("/health").json()["outstanding"] == 0
    assert not engine.loop.busy
    engine.cache.tree.check()


@pytest.mark.slow
def test_a_long_prompt_keeps_nobody_waiting(client: httpx.Client) -> None:
    slowest, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal slowest
        with httpx.Client(base_url=client.base_url) as other:
            while not ended.is_set():
                begin = time.perf_counter()
                other.get("/health")
                slowest = max(slowest, time.perf_counter() - begin)

    watcher = threading.Thread(target=watch)
    watcher.start()
    answer = post(client, "/v1/completions", {**COMPLETION, "prompt": "many words " * 40_000})
    took = answer.elapsed.total_seconds()
    ended.set()
    watcher.join()
    assert "512 positions" in answer.json()["error"]["message"]
    assert slowest < took or took < 0.2
    too_long = post(client, "/v1/completions", b'{"prompt": "' + b"x" * (16 << 20) + b'"}')
    assert too_long.status_code == 413
    expect_well(client, too_long)


# -- the engine's own failures ----------------------------------------------------------------------------------------


def test_an_error_in_the_engine_fails_what_is_outstanding_and_the_next_request_is_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_engine()
    with in_thread(own) as url, httpx.Client(base_url=url, timeout=30) as client:
        expected = post(client, "/v1/completions", COMPLETION).json()["choices"]

        def broken() -> Any:
            raise OverflowError("a mistake of the engine")

        for owner, name in ((own, "step"), (own.loop.runner, "run")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, lambda *_: broken())
                caplog.clear()
                for _ in range(3):
                    answer = post(client, "/v1/completions", COMPLETION)
                    assert answer.status_code == 500
                    assert "a mistake of the engine" in answer.json()["error"]["message"]
                    assert answer.json()["error"]["type"] == "server_error"
                assert sum(record.exc_info is not None for record in caplog.records) == 1
                health = client.get("/health")
                assert health.status_code == 503
                assert "a mistake of the engine" in health.json()["status"]
            assert post(client, "/v1/completions", COMPLETION).json()["choices"] == expected
            assert client.get("/health").status_code == 200


def test_health_tells_of_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    own, go_on = make_engine(), threading.Event()
    right = own.loop.runner.run

    def hang(*args: Any) -> Any:
        go_on.wait(20)
        return right(*args)

    monkeypatch.setattr(own.loop.runner, "run", hang)
    with in_thread(own, stalled_after_s=0.2) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert client.get("/health").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, client, "/v1/completions", COMPLETION)
            while (health := client.get("/health")).status_code == 200:
                time.sleep(0.02)
            assert "no step for" in health.json()["status"]
            go_on.set()
            assert answer.result().status_code == 200
        assert client.get("/health").status_code == 200


def test_a_model_without_finite_logits_says_so() -> None:
    own = make_engine()
    own.model.lm_head.weight.data.fill_(float("nan"))
    (tree,) = own.generate([[5]], SamplingParams(n=2, max_new_tokens=3))
    assert set(tree.meta["errors"].values()) == {"the model's logits were not finite"}
    with in_thread(own) as url, httpx.Client(base_url=url, timeout=30) as client:
        answer = post(client, "/v1/completions", COMPLETION)
        assert answer.status_code == 500
        assert "logits were not finite" in answer.json()["error"]["message"]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def end_within_seconds(process: Any, url: str, moment: float) -> None:
    """SIGTERM while streams are under way, one client does not read, one is in CLOSE-WAIT and one sends half a body."""
    host, port = url.removeprefix("http://").split(":")
    body = {**COMPLETION, "max_tokens": 400, "n": 8, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    wires = [socket.create_connection((host, int(port))) for _ in range(6)]
    for i, wire in enumerate(wires):
        wire.sendall(head + (raw if i else raw[:5]))
    wires[1].shutdown(socket.SHUT_WR)

    def send_much() -> None:
        with contextlib.suppress(OSError):  # the server ends meanwhile
            hang_up(url, {"prompt": "many words " * 400_000, "max_tokens": 1}, 0, reset=False)

    threading.Thread(target=send_much, daemon=True).start()
    time.sleep(moment)
    begin = time.monotonic()
    process.terminate()
    process.join(timeout=30)
    assert not process.is_alive()
    took = time.monotonic() - begin
    for wire in wires:
        wire.close()
    assert took < 5, took


@pytest.mark.slow
def test_sigterm_ends_the_server_within_seconds(directory: Path) -> None:
    with as_process(directory) as (process, url):
        end_within_seconds(process, url, 0.3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_mixed_requests(directory: Path, cases: int) -> None:
    """A third malformed, 64 clients hanging up at random; every valid one answered as alone, and memory flat."""
    total = max(5 * cases, 500)
    rng = random.Random(0)
    prompts = ["a", "bc", "hello there", "x" * 60]
    options: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 5, "n": 2}, {"top_p": 0.7, "stop": ["e"]}]
    valid = [
        ("/v1/completions", {"prompt": p, "max_tokens": 12, "seed": 7 * i, "ignore_eos": True, **o})
        for i, (p, o) in enumerate((p, o) for p in prompts for o in options)
    ]
    with as_process(directory) as (process, url), httpx.Client(base_url=url, timeout=120) as client:
        alone = [[c["text"] for c in post(client, *ask).json()["choices"]] for ask in valid]
        memory, ended = psutil.Process(process.pid), threading.Event()

        def hang_up_at_random(seed: int) -> None:
            own = random.Random(seed)
            while not ended.is_set():
                body = {**COMPLETION, "max_tokens": 300, "n": own.choice([1, 4]), "stream": own.random() < 0.7}
                after = own.choice([-seed - 1, 0, own.randrange(800) if body["stream"] else 0])
                with contextlib.suppress(OSError):
                    hang_up(url, body, after, reset=own.random() < 0.5)
                ended.wait(own.random() * 20)

        def ask(i: int) -> None:
            own = random.Random(i)
            if own.random() < 1 / 3:
                path, changes, said = own.choice(REFUSED)
                answer = post(client, path, changes if isinstance(changes, bytes) else {**PATHS[path], **changes})
                assert said in answer.json()["error"]["message"]
            else:
                which = own.randrange(len(valid))
                answer = post(client, *valid[which])
                assert [c["text"] for c in answer.json()["choices"]] == alone[which]

        clients = [threading.Thread(target=hang_up_at_random, args=(i,)) for i in range(64)]
        for thread in clients:
            thread.start()
        resident = []
        with ThreadPoolExecutor(16) as pool:
            for part in range(10):
                list(pool.map(ask, range(part * total // 10, (part + 1) * total // 10)))
                resident.append(memory.memory_info().rss >> 20)
                assert client.get("/health").json()["status"] == "ok"
        ended.set()
        for thread in clients:
            thread.join()
        print("resident MiB by tenths:", resident)
        assert resident[-1] < 1.15 * resident[2]
        for _ in range(200):
            if client.get("/health").json()["outstanding"] == 0:
                break
            time.sleep(0.1)
        assert client.get("/health").json()["outstanding"] == 0
    for _ in range(5):
        with as_process(directory) as (process, url):
            end_within_seconds(process, url, rng.random())
