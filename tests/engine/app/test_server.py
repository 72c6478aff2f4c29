"""The server through OpenAI's own client."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import uvicorn
from starlette.testclient import TestClient
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rolltree.engine.app.cli import main
from rolltree.engine.app.server import make_app
from rolltree.engine.app.server.app import _EMPTY
from rolltree.engine.protocols.form import Form, Scored
from rolltree.engine.protocols.schema import CompletionBody
from rolltree.engine.rollout import EngineConfig, NativeEngine, SamplingParams

from ..rollout.test_native_engine import PROMPTS, letters, model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}\u0120{% endif %}"


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    tokenizer = letters()
    tokenizer.chat_template = TEMPLATE
    return NativeEngine(model("qwen3"), tokenizer, EngineConfig(page_size=4, kv_tokens=4096))


@pytest.fixture(scope="module")
def client(engine: NativeEngine) -> Iterator[openai.OpenAI]:
    server = uvicorn.Server(uvicorn.Config(make_app(engine, "tiny"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    server.should_exit = True
    thread.join()


def text(ids: list[int]) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def test_completions_are_the_engines(client: openai.OpenAI, engine: NativeEngine) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[2], n=3, max_tokens=12, seed=5, logprobs=2, extra_body=extra
    )
    (tree,) = NativeEngine(model("qwen3"), config=engine.config).generate(
        [PROMPTS[2]], SamplingParams(n=3, max_new_tokens=12, seed=5, ignore_eos=True)
    )
    for choice, leaf in zip(answer.choices, tree.flatten(), strict=True):
        assert choice.text == text(leaf.response)
        assert choice.token_ids == leaf.response  # type: ignore[attr-defined]
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        np.testing.assert_allclose(choice.logprobs.token_logprobs, leaf.behaviour_logprob, rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPTS[2]), 36)


def test_streams_say_the_same_in_pieces_and_stops_are_cut_off(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": text(PROMPTS[3]), "max_tokens": 30, "seed": 3, "n": 2}
    body["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**body)
    stop = whole.choices[0].text[10:12]
    for stops in (None, [stop]):
        expected = [c.text.partition(stop)[0] if stops else c.text for c in whole.choices]
        parts = ["", ""]
        pieces = 0
        for event in client.completions.create(**body, stop=stops, stream=True, stream_options={"include_usage": True}):
            for choice in event.choices:
                parts[choice.index] += choice.text
                pieces += 1
        assert parts == expected
        assert pieces > 2, "only the ends of the choices"  # how many come before depends on the load
        assert event.usage is not None
        direct = client.completions.create(**body, stop=stops)
        assert [c.text for c in direct.choices] == expected
        assert direct.choices[0].finish_reason == ("stop" if stops else "length")


def test_a_conversation_computes_each_turn_once(client: openai.OpenAI, engine: NativeEngine) -> None:
    engine.forget_prefixes()
    engine.reset_stats()
    messages: list[Any] = [{"role": "user", "content": text(PROMPTS[3])}]
    for turn in range(3):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, logprobs=True, extra_body={"ignore_eos": True}
        )
        said = answer.choices[0].message.content
        assert said is not None
        prompt = "".join(m["content"] for m in messages) + "\u0120"
        ids = letters()(prompt)["input_ids"]
        expected = model("qwen3").generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert said == text(expected[0, len(ids) :].tolist())
        assert answer.choices[0].logprobs is not None
        messages += [{"role": "assistant", "content": "\u0120" + said}, {"role": "user", "content": text([30 + turn])}]
    assert engine.stats["prefill_tokens"] <= len(PROMPTS[3]) + 1 + 2 * 3


def test_many_clients_at_once_get_what_each_would_alone(client: openai.OpenAI) -> None:
    def ask(i: int) -> str:
        prompt = PROMPTS[i % len(PROMPTS)]
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=16, seed=i).choices[0].text

    alone = [ask(i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_a_client_that_hangs_up_frees_its_rows(client: openai.OpenAI, engine: NativeEngine) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS[3], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    for _ in range(200):
        if not engine.loop.busy:
            break
        time.sleep(0.05)
    assert not engine.loop.busy
    engine.cache.tree.check()


def sentencepiece() -> PreTrainedTokenizerFast:
    """Pieces as Llama 2's tokenizer has them: a blank is part of a piece, and decoding drops the first."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581Hello", "\u2581world", "\u2581", "ing", "!", "<0xE4>", "<0xBD>", "\u2581a"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "\n"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("ids", [[3, 4], [4, 6, 7], [3, 5, 5, 4], [10, 4, 11, 3], [7, 10, 6], [3, 2, 4]])
def test_names_of_tokens_keep_their_blanks(ids: list[int]) -> None:
    tokenizer = sentencepiece()
    form = Form(tokenizer, "m", CompletionBody(prompt="x"), (), chat=False, logprobs=True)
    said = form.spell(Scored(ids, [0.0] * len(ids), [None] * len(ids)), 0)
    written = "".join(said["tokens"])
    assert written.removeprefix(" ") == tokenizer.decode(ids)
    assert said["text_offset"] == [len("".join(said["tokens"][:i])) for i in range(len(ids))]
    byte = form.spell(Scored([8], [0.0], [None]), 0)["tokens"]
    assert byte == ["bytes:\\xe4"]


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    said = [{"role": "user", "content": "x"}]
    for ask in (
        lambda: client.models.retrieve("other"),
        lambda: client.completions.create(model="other", prompt="x"),
        lambda: client.chat.completions.create(model="other", messages=said, stream=True),  # type: ignore[call-overload]
    ):
        with pytest.raises(openai.NotFoundError, match="no model 'other' here; this is 'tiny'") as caught:
            ask()
        assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")


def small(template: str = TEMPLATE) -> NativeEngine:
    tokenizer = letters()
    tokenizer.chat_template = template
    return NativeEngine(model("qwen3"), tokenizer, EngineConfig(page_size=4, kv_tokens=512))


def test_a_stream_ends_with_an_error_where_the_tokenizer_changes_what_was_sent() -> None:
    tokenizer = letters()
    changes = [decoders.Fuse(), decoders.Replace(Regex("^.(?=.{5})"), "changed")]  # of texts of six characters and more
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(changes)
    form = Form(tokenizer, "m", CompletionBody(prompt="x"), (), chat=False, logprobs=False)
    for length, ending in ((5, '"text": ""'), (6, "The tokenizer changed text that was sent")):
        choice, ids = form.streamed(), list(range(1, length + 1))
        assert "".join(choice.add([token]).text for token in ids) == text(ids)
        completion = dataclasses.replace(_EMPTY, token_ids=np.array(ids, np.int32))
        assert ending in form.last(0, choice, completion, [[1]])


@pytest.mark.parametrize("stream", [False, True])
def test_hints_of_agents_are_for_the_template_or_named_as_ignored(stream: bool) -> None:
    knows = "{% generation %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'x' %}{% endif %}"
    knows += "{{ reasoning_effort }}{{ messages[0].verbosity }}{% endgeneration %}" + TEMPLATE
    said = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2, "stream": stream}
    asked = said | {"stream_options": {"include_usage": True}} if stream else said

    def prompt_tokens(answer: httpx.Response) -> int:
        assert answer.status_code == 200, answer.text
        return int(re.findall(r'"prompt_tokens": ?(\d+)', answer.text)[-1])

    for template, ignored, taken in ((TEMPLATE, "reasoning_effort, verbosity", 0), (knows, "verbosity", 4)):
        with TestClient(make_app(small(template), "tiny")) as http:
            plain = http.post("/v1/chat/completions", json=asked)
            assert "x-rolltree-ignored" not in plain.headers
            hinted = http.post(
                "/v1/chat/completions", json=asked | {"reasoning_effort": "abcde", "verbosity": "medium"}
            )
            assert hinted.headers["x-rolltree-ignored"] == ignored
            assert prompt_tokens(hinted) - prompt_tokens(plain) == taken
            twice = said | {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
            refused = http.post("/v1/chat/completions", json=twice)
            assert refused.status_code == 400
            assert "`reasoning_effort` is in `chat_template_kwargs` too" in refused.text


def test_without_the_key_only_the_health_is_told() -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "temperature": 0}
    with TestClient(make_app(small(), "tiny", api_key="a-Key")) as http:

        def ask(path: str = "/v1/completions", given: str | None = None, **more: Any) -> httpx.Response:
            headers = {} if given is None else {"authorization": given}
            return http.post(path, json=body | more, headers=headers)

        right = ask(given="Bearer a-Key")
        assert right.status_code == 200
        assert ask(given="bearer  a-Key").json()["choices"] == right.json()["choices"]
        assert "data: [DONE]" in ask(given="Bearer a-Key", stream=True).text
        wrong: list[str | None] = [None, "", "Bearer", "Bearer ", "Bearer a-Ke", "Bearer a-Key2", "Bearer a-key"]
        wrong += ["a-Key", "Basic a-Key", "Bearer a-K\u00e9y", "Bearer a-Key a-Key"]
        for given in wrong:
            for path, more in (("/v1/completions", {"stream": True}), ("/v1/chat/completions", {}), ("/nowhere", {})):
                refused = http.post(
                    path, json=body | more, headers={} if given is None else {"authorization": given.encode("latin-1")}
                )
                assert refused.status_code == 401, given
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert "a-Key" not in refused.text
        assert http.get("/v1/models").status_code == http.get("/docs").status_code == 401
        assert http.get("/health").status_code == 200
        assert http.get("/health/").status_code == http.get("//health").status_code == 401


def test_clients_of_openai_send_the_key() -> None:
    with TestClient(make_app(small(), "tiny", api_key="k")) as http:
        ask = functools.partial(openai.OpenAI, base_url="http://testserver/v1", max_retries=0, http_client=http)
        assert [m.id for m in ask(api_key="k").models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError, match="key is missing or wrong") as caught:
            ask(api_key="other").models.list()
        assert caught.value.code == "invalid_api_key"


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("host", "flags", "variable", "said"),
    [
        ("0.0.0.0", [], None, "Other machines can reach 0.0.0.0"),
        ("", [], None, "Other machines can reach 0.0.0.0"),
        ("::", [], None, "Other machines can reach ::"),
        ("0.0.0.0", ["--api_key", ""], "k", "is empty"),
        ("127.0.0.1", ["--api_key", "a b"], None, "has blanks"),
        ("127.0.0.1", [], "", "is empty"),
        ("0.0.0.0", ["--api_key", "k"], None, "no-model"),  # the next thing that is wrong
        ("0.0.0.0", [], "k", "no-model"),
        ("127.0.0.2", [], None, "no-model"),
        ("localhost", [], None, "no-model"),
    ],
)
def test_an_address_that_others_reach_needs_a_key(
    host: str, flags: list[str], variable: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("ROLLTREE_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ROLLTREE_API_KEY", variable)
    assert main(["serve", "/no-model", "--host", host, "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    ("positions", "kv_tokens", "page"), [(4096, 512, 4), (64, 512, 16), (4096, 100, 16), (96, 96, 16), (4096, 48, 1)]
)
def test_a_chat_without_a_length_goes_on_as_far_as_positions_and_cache_reach(
    positions: int, kv_tokens: int, page: int
) -> None:
    tokenizer = letters()
    tokenizer.chat_template = TEMPLATE
    small = copy.deepcopy(model("qwen3"))
    small.config.max_position_embeddings = positions
    engine = NativeEngine(small, tokenizer, EngineConfig(page_size=page, kv_tokens=kv_tokens))
    with TestClient(make_app(engine, "tiny")) as http:
        for said in ("ab", "abcdefghijklmnop", "abcdefghijklmnopq"):
            body = {"messages": [{"role": "user", "content": said}], "ignore_eos": True}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            prompt = len(said) + 1
            free = kv_tokens // page - -(-prompt // page)
            expected = min(positions - prompt, (free - -(-free // 8)) * page)
            assert answer.json()["usage"]["completion_tokens"] == expected
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        whole = min(positions, kv_tokens // page * page)
        body = {"messages": [{"role": "user", "content": "b" * (whole - 1)}]}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert re.search("exceed the model's|cannot fit into the KV cache", refused.json()["error"]["message"])


NO_OPS: dict[str, Any] = {
    "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_tokens": 0, "length_penalty": 1, "use_beam_search": False, "bad_words": [], "logit_bias": {}, "stop": [],
    "stop_token_ids": [], "skip_special_tokens": True, "prompt_logprobs": None, "detokenize": True,
    "thinking_token_budget": None, "request_id": None, "metadata": {"run": "1"}, "store": False,
    "service_tier": "auto", "user": "u", "seed": None, "structured_outputs": None, "vllm_xargs": {},
    "prediction": None, "best_of": 1,
}  # fmt: skip
"""Options of OpenAI's and vLLM's clients with values that change nothing."""
CHAT_NO_OPS: dict[str, Any] = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]}


def test_options_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    def answer(**body: Any) -> Any:
        given = {"max_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True, **body}}
        plain = client.completions.create(model="tiny", prompt="x", **given).choices[0].text  # type: ignore[call-overload]
        chat = given | {"extra_body": given["extra_body"] | (CHAT_NO_OPS if body else {})}
        said = [{"role": "user", "content": "x"}]
        return plain, client.chat.completions.create(model="tiny", messages=said, **chat).choices[0].message.content

    assert answer(**NO_OPS) == answer()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.1), ("min_tokens", 1), ("top_k", -2), ("bad_words", ["x"]), ("detokenize", False),
        ("thinking_token_budget", 4), ("request_id", "a"), ("store", True), ("prompt_logprobs", 0), ("unknown", None),
    ],
)  # fmt: skip
def test_options_that_would_change_something_are_refused_by_name(client: openai.OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        client.completions.create(model="tiny", prompt="x", max_tokens=2, extra_body={name: value})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": 600}, "exceed the model's 512 positions"),
        ({"temperature": -1}, "temperature is -1"),
        ({"extra_body": {"beam": 3}}, "`beam`: Extra inputs are not permitted"),
        ({"frequency_penalty": 0.5}, "`frequency_penalty`"),
        ({"prompt": [5, 999]}, "outside the model's vocabulary"),
    ],
)
def test_wrong_requests_get_a_sentence(client: openai.OpenAI, body: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(**{"model": "tiny", "prompt": "x", **body})
