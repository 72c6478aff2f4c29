"""The run's server against clients of every kind: keys, ends, hang-ups, repeats, hostile bodies, three protocols."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rolltree.engine.agents.episode import Episode
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rollout import NativeEngine

from ...support.agents import QUESTION, agent, job, sampler

WAIT = """
import os, time

def solve(task, client):
    while not os.path.exists({flag!r}):
        time.sleep(0.01)
    return 1.0
"""
CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 6}


@dataclass
class Open:
    """A group whose agents wait until `end`; the test calls in their place."""

    made: Any
    episodes: list[Episode]
    folder: Path
    flights: list[Any]
    stopping: bool = False
    paused: bool = False
    stepping: threading.Lock = field(default_factory=threading.Lock)

    def pause(self) -> None:
        """Let the test alone step the sampler."""
        self.paused = True
        with self.stepping:  # the present step has ended
            pass

    def client(self, number: int = 0, key: str | None = None, **headers: str) -> httpx.Client:
        episode = self.episodes[number]
        key = episode.key if key is None else key
        base = self.made._door.address()
        return httpx.Client(base_url=base, headers={"authorization": f"Bearer {key}", **headers}, timeout=30)

    def end(self) -> TokenTree:
        (self.folder / "flag").touch()
        deadline = time.monotonic() + 20
        while not self.flights[0].done:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert self.flights[0].tree is not None, self.flights[0].error
        return self.flights[0].tree  # type: ignore[no-any-return]


@contextmanager
def group(engine: NativeEngine, folder: Path, n: int = 1, params: Any = None, **options: Any) -> Iterator[Open]:
    text = WAIT.format(flag=str(folder / "flag"))
    with sampler(engine, agent=agent(folder, text), **options) as made:
        flights = made.submit([job(engine, n=n, **(params or {}))])
        opened = Open(made, list(made._groups[flights[0]].episodes), folder, flights)

        def steps() -> None:
            while not opened.stopping:
                with opened.stepping:
                    if not opened.paused:
                        made.step(0.02)
                time.sleep(0.005 if opened.paused else 0)

        thread = threading.Thread(target=steps, daemon=True)
        thread.start()
        try:
            yield opened
        finally:
            opened.stopping = True
            (folder / "flag").touch()
            thread.join(10)


@pytest.mark.check
def test_keys(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, n=2, roles=["planner"]) as opened:
        other, right = opened.episodes[1].key, opened.episodes[0].key
        mixed = right.partition("-")[0] + "-" + other.partition("-")[2]
        for key in ("none", mixed, right[:-1], right + "x", right.partition("-")[0], f"{mixed}:planner", ":planner"):
            with opened.client(key=key) as client:
                for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/reward"):
                    refused = client.post(path, json=CHAT)
                    assert refused.status_code == 401, (key, path)
                    assert right not in refused.text
                    assert "key is missing, or no episode's" in refused.text
                assert client.get("/v1/models").status_code == 401
        with opened.client(key=f"{right}:stranger") as client:
            assert "ends with the role 'stranger'" in client.post("/v1/chat/completions", json=CHAT).text
        with opened.client(key=f"{right}:planner") as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        with opened.client() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            nowhere = client.post("/v1/completions", json={"prompt": "x"})
            assert nowhere.status_code == 404
        with opened.client(1) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert [len(episode.calls) for episode in opened.episodes] == [2, 1], "the key tells the episode"
        without = httpx.post(opened.made._door.address() + "/v1/chat/completions", json=CHAT)
        assert without.status_code == 401
        tree = opened.end()
    assert tree.meta["roles"] == ["agent", "planner"]
    assert tree.meta["agent"]["calls"] == 3


def test_an_ended_episode_is_gone_for_its_key_alone(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, n=2) as opened:
        with opened.client() as client, opened.client(1) as other:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            assert other.post("/v1/chat/completions", json=CHAT).status_code == 200
        tree = opened.end()
        sampled = int(tree.loss_mask.sum())
        with opened.client() as client:
            for path in ("/v1/chat/completions", "/v1/messages", "/reward"):
                assert client.post(path, json=CHAT).status_code == 410
        with opened.client(key=opened.episodes[0].key[:-1]) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 401
        assert int(tree.loss_mask.sum()) == sampled


@pytest.mark.check
def test_three_protocols_whole_and_streamed_are_one_conversation(engine: NativeEngine, tmp_path: Path) -> None:
    """Each goes on where another ended, so all calls are one sequence."""
    with group(engine, tmp_path, params={"max_new_tokens": 400}) as opened:
        base = opened.made._door.address()
        client = openai.OpenAI(base_url=f"{base}/v1", api_key=opened.episodes[0].key, max_retries=0)
        talk: list[Any] = list(QUESTION)

        def go_on(said: str | None) -> None:
            talk.extend([{"role": "assistant", "content": said}, {"role": "user", "content": "on"}])

        go_on(client.chat.completions.create(model="m", messages=talk, max_tokens=6).choices[0].message.content)
        parts = client.chat.completions.create(model="m", messages=talk, max_tokens=6, stream=True)
        go_on("".join(part.choices[0].delta.content or "" for part in parts))
        go_on(client.responses.create(model="m", input=talk, max_output_tokens=6).output_text)
        with client.responses.stream(model="m", input=talk, max_output_tokens=6) as stream:
            go_on(stream.get_final_response().output_text)
        with opened.client(**{"x-api-key": opened.episodes[0].key}) as http:
            http.headers.pop("authorization")
            count = http.post("/v1/messages/count_tokens", json={"messages": talk})
            assert count.json()["input_tokens"] > 0
            go_on(http.post("/v1/messages", json={"messages": talk, "max_tokens": 6}).json()["content"][0]["text"])
            told = http.post("/v1/messages", json={"messages": talk, "max_tokens": 6, "stream": True}).text
            events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
        go_on("".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta"))
        last = client.chat.completions.create(model="m", messages=talk, max_tokens=6)
        assert last.usage is not None
        tree = opened.end()
    assert (tree.num_leaves, tree.meta["agent"]["calls"]) == (1, 7)
    (leaf,) = tree.flatten()
    assert len(leaf.prompt) + len(leaf.response) == last.usage.total_tokens


def test_a_client_that_hangs_up_is_not_recorded(engine: NativeEngine, tmp_path: Path) -> None:
    """In a stream or not; the next call of the same conversation is as if there had been none."""
    with group(engine, tmp_path, params={"max_new_tokens": 400}) as opened:
        opened.pause()
        port = int(opened.made._door.address().split(":")[2].split("/")[0])
        for stream in (False, True):
            body = json.dumps(CHAT | {"stream": stream, "max_tokens": 200}).encode()
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                head += f"Authorization: Bearer {opened.episodes[0].key}\r\nContent-Length: {len(body)}\r\n\r\n"
                raw.sendall(head.encode() + body)
                until(lambda: bool(opened.episodes[0].open))
            until(lambda: not opened.episodes[0].open)
        opened.paused = False
        with opened.client() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == 1
    assert tree.meta["counts"] == {"aborted_calls": 2}
    assert int(tree.loss_mask.sum()) <= 6


def until(true: Any) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.check
def test_a_clients_second_try_is_the_same_call(engine: NativeEngine, tmp_path: Path) -> None:
    """OpenAI's and Anthropic's clients say that they try again; the answer that they missed is told once more."""
    with group(engine, tmp_path, params={"max_new_tokens": 400}) as opened:
        with opened.client() as client:
            first = client.post("/v1/chat/completions", json=CHAT)
            again = client.post("/v1/chat/completions", json=CHAT, headers={"x-stainless-retry-count": "1"})
            assert again.json() == first.json()
            anew = client.post("/v1/chat/completions", json=CHAT, headers={"x-stainless-retry-count": "0"})
            assert anew.json()["id"] != first.json()["id"]
            opened.pause()
            with pytest.raises(httpx.ReadTimeout):  # a third call of the same body: its second try is none of the first
                client.post("/v1/chat/completions", json=CHAT, timeout=0.5)
            until(lambda: not opened.episodes[0].open)
            opened.paused = False
            third = client.post("/v1/chat/completions", json=CHAT, headers={"x-stainless-retry-count": "1"})
            assert third.json()["id"] not in (first.json()["id"], anew.json()["id"])
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == 3


def test_calls_without_an_answer_do_not_count(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, calls=2) as opened, opened.client() as client:
        for _ in range(3):
            assert client.post("/v1/chat/completions", json=CHAT | {"temperature": -1}).status_code == 400
        for status in (200, 200, 429):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == status
        opened.end()


def test_calls_beyond_those_at_once_are_asked_to_come_back(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, at_once=2, params={"max_new_tokens": 400}) as opened:
        opened.pause()
        answers: list[httpx.Response] = []

        def ask() -> None:
            with opened.client() as client:
                answers.append(client.post("/v1/chat/completions", json=CHAT))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: len(opened.episodes[0].open) == 2)
        with opened.client() as client:
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert client.post("/v1/messages", json=CHAT).json()["error"]["type"] == "rate_limit_error"
        opened.paused = False
        for thread in threads:
            thread.join(20)
        assert [answer.status_code for answer in answers] == [200, 200]
        # OpenAI's client comes back by itself
        base = opened.made._door.address()
        client_ = openai.OpenAI(base_url=f"{base}/v1", api_key=opened.episodes[0].key)
        assert client_.chat.completions.create(model="m", messages=QUESTION, max_tokens=3).choices  # type: ignore[arg-type]
        opened.end()


@pytest.mark.slow(but=5)
@pytest.mark.check(but=3)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (CHAT | {"n": 2}, "one answer"),
        (CHAT | {"logprobs": True}, "no log-probs"),
        (CHAT | {"max_tokens": 0}, "max_tokens"),
        (CHAT | {"temperature": -1}, "temperature is -1"),
        (CHAT | {"logit_bias": {"9999": 1}}, "outside the model's vocabulary"),
        (CHAT | {"unknown": 1}, "`unknown`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text parts only"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "leaves no room for an answer"),
        ([], "object"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_the_episode_goes_on(
    engine: NativeEngine, tmp_path: Path, body: Any, said: str
) -> None:
    with group(engine, tmp_path) as opened:
        with opened.client() as client:
            refused = client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == 1
    assert "errors" not in tree.meta
