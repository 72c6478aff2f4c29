"""Streams of the run's server: told while the engine samples, ended whole, by an error, or by their client."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.rollout import NativeEngine
from rolltree.engine.rollout.sampler import LostError

from .test_door import CHAT, Open, group, until

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}


def body(path: str, most: int, **more: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": CHAT["messages"], "max_output_tokens": most, "stream": True, **more}
    return {**CHAT, "max_tokens": most, "stream": True, **more}


def text_of(path: str, event: dict[str, Any]) -> str:
    """The text that an event adds."""
    if path == "/v1/chat/completions":
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if path == "/v1/responses":
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


class Heard:
    """A client in a thread: the events of its stream as they come, and the status."""

    def __init__(self, opened: Open, path: str, asked: dict[str, Any]) -> None:
        self.path, self.events = path, list[dict[str, Any]]()
        self.status: int | None = None
        self.over = threading.Event()
        self.hang_up = threading.Event()
        self._news: queue.Queue[None] = queue.Queue()
        threading.Thread(target=self._listen, args=(opened, asked), daemon=True).start()

    @property
    def text(self) -> str:
        return "".join(text_of(self.path, event) for event in list(self.events))

    def _listen(self, opened: Open, asked: dict[str, Any]) -> None:
        try:
            with opened.client() as client, client.stream("POST", self.path, json=asked) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line[6:]))
                    if self.hang_up.is_set():
                        break
        except httpx.HTTPError:
            pass
        self.over.set()


@contextmanager
def stepped(engine: NativeEngine, folder: Path, **params: Any) -> Iterator[Open]:
    """A group whose sampler the test steps."""
    with group(engine, folder, params=LONG | params) as opened:
        opened.pause()
        yield opened


def begun(opened: Open, path: str, most: int = 200, **more: Any) -> Heard:
    """A stream of which some text has come, while the call is not complete."""
    heard = Heard(opened, path, body(path, most, **more))
    until(lambda: bool(opened.episodes[0].open))

    def told() -> bool:
        opened.made.step(0.01)
        return len(heard.text) > 3

    until(told)
    (call,) = opened.episodes[0].open
    assert not call.answer.done()
    assert len(call.sampled) < most
    return heard


def recorded(engine: NativeEngine, tree: TokenTree) -> str:
    """The text of what was sampled."""
    words: Any = engine.tokenizer
    return str(words.decode(tree.token_id[tree.loss_mask], skip_special_tokens=True))


def finished(opened: Open, heard: Heard) -> None:
    def over() -> bool:
        opened.made.step(0.01)
        return heard.over.is_set()

    until(over)


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("path", PATHS)
def test_text_is_told_while_it_is_sampled(engine: NativeEngine, tmp_path: Path, path: str) -> None:
    """And all of it together is the answer that is recorded."""
    with stepped(engine, tmp_path) as opened:
        heard = begun(opened, path, 60)
        early = heard.text
        finished(opened, heard)
        opened.paused = False
        tree = opened.end()
    assert heard.status == 200
    assert int(tree.loss_mask.sum()) == 60
    assert heard.text == recorded(engine, tree)
    assert heard.text.startswith(early)
    assert len(early) < len(heard.text)


def test_what_engines_elsewhere_sample_is_told_at_its_end(engine: NativeEngine, tmp_path: Path) -> None:
    with stepped(engine, tmp_path) as opened:
        opened.made._local = None  # as with rollout.engines
        heard = Heard(opened, PATHS[0], body(PATHS[0], 40))
        until(lambda: bool(opened.episodes[0].open))
        for _ in range(20):
            opened.made.step(0.0)
            assert heard.status is None
        finished(opened, heard)
        opened.paused = False
        tree = opened.end()
    assert int(tree.loss_mask.sum()) == 40
    assert heard.text == recorded(engine, tree)


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_hangs_up_in_a_stream_is_not_recorded(engine: NativeEngine, tmp_path: Path, path: str) -> None:
    with stepped(engine, tmp_path) as opened:
        heard = begun(opened, path)
        heard.hang_up.set()

        def dropped() -> bool:
            opened.made.step(0.01)
            return not opened.episodes[0].open and not opened.made._calls

        until(dropped)
        assert not engine.loop.requests
        opened.paused = False
        with opened.client() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == 1
    assert tree.meta["counts"] == {"aborted_calls": 1}
    assert int(tree.loss_mask.sum()) == 6
    assert not engine.loop.busy


@pytest.mark.slow(but=5)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cause", ["end", "engine", "time"])
def test_a_stream_that_cannot_go_on_ends_with_an_error(
    engine: NativeEngine, tmp_path: Path, path: str, cause: str
) -> None:
    """In the protocol's own form, and the call is not recorded."""
    said = {"end": "This episode has ended.", "engine": "The engine failed: no memory.", "time": "(call_timeout_s)"}
    with stepped(engine, tmp_path) as opened:
        heard = begun(opened, path)
        if cause == "end":
            (tmp_path / "flag").touch()  # the agent returns while a call of its is open
        elif cause == "time":
            opened.made.program.call_timeout_s = 0.0
        else:
            step = opened.made.inner.step

            def failing(seconds: float) -> Any:
                done = step(seconds)
                flights = list(opened.made._calls)
                opened.made.inner.drop([flight for flight in flights if not flight.done])
                for flight in flights:
                    flight.tree, flight.error = None, RuntimeError("no memory")
                return [*done, *flights]

            opened.made.inner.step = failing
        finished(opened, heard)
        opened.made.program.call_timeout_s = 600.0
        opened.paused = False
        tree = opened.end()
    last = heard.events[-1]
    if path == "/v1/responses":
        assert [event["type"] for event in heard.events[-2:]] == ["error", "response.failed"]
        last = last["response"]
    assert said[cause] in last["error"]["message"]
    assert tree.meta["agent"]["calls"] == 0
    assert int(tree.loss_mask.sum()) == 0


def test_an_error_before_any_text_has_its_own_status(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, params=LONG) as opened, opened.client() as client:
        asked = body(PATHS[0], 5, logit_bias={"99999": 1})
        answer = client.post(PATHS[0], json=asked)
        assert answer.status_code == 400
        assert "outside the model's vocabulary" in answer.json()["error"]["message"]
        opened.end()


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("same", [True, False])
def test_a_stream_whose_engine_is_lost_goes_on_only_with_the_same_text(
    engine: NativeEngine, tmp_path: Path, same: bool
) -> None:
    """The call is sampled again; what was told cannot be taken back."""
    with stepped(engine, tmp_path) as opened:
        heard = begun(opened, PATHS[0], 60)
        (flight, call), *_ = opened.made._calls.items()
        opened.made.inner.drop([flight])
        if not same:
            call.params = type(call.params)(**{**vars(call.params), "seed": call.params.seed + 1})
        flight.error = LostError("gone")
        opened.made._answer([flight])
        finished(opened, heard)
        opened.paused = False
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == int(same)
    if same:
        assert int(tree.loss_mask.sum()) == 60
        assert heard.text == recorded(engine, tree)
    else:
        assert "not what has been told" in heard.events[-1]["error"]["message"]


def test_a_stream_is_told_again_to_a_client_that_missed_it(engine: NativeEngine, tmp_path: Path) -> None:
    with group(engine, tmp_path, params=LONG) as opened, opened.client() as client:
        asked = body(PATHS[0], 30)
        first = client.post(PATHS[0], json=asked)
        again = client.post(PATHS[0], json=asked, headers={"x-stainless-retry-count": "1"})
        assert again.text == first.text
        assert first.text.count("data: ") > 3
        tree = opened.end()
    assert tree.meta["agent"]["calls"] == 1
