"""Calls that a model writes of its own accord, through OpenAI's client: whole, in pieces, malformed, and read back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.chat.reading import read_turn
from rolltree.engine.chat.streamed import Streamed
from rolltree.engine.chat.tool_formats import FORMATS
from rolltree.engine.protocols.schema import Sampling
from rolltree.engine.rollout import NativeEngine

from ..support.serving import in_thread

Say = Callable[[str], None]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
NESTED = '<tool_call>{"name": "look", "arguments": {"x": {"y": "<\u00fc>"}}}</tool_call>'
PIECES = [
    CALL, NESTED, "<tool_call>", "</tool_call>", "<tool_", "call>", "text ", "\n", "\u00fc", "{", "}", "<", ">",
    '"look"', '<tool_call>{"name": "none", "arguments": {}}</tool_call>', "<tool_call>[]</tool_call>",
    '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>', "<tool_call>" + "[" * 9000 + "</tool_call>",
    '<tool_call>{"name": "look", "arguments": 3}</tool_call>', '<tool_call>{"name": "look"}</tool_call>',
]  # fmt: skip


@pytest.fixture(scope="module")
def client(engine: NativeEngine) -> Iterator[openai.OpenAI]:
    with in_thread(engine) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def say(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Have the model answer with a text, then end."""
    right = Sampling.sampling_params

    def fix(text: str) -> None:
        assert engine.tokenizer is not None
        ids: list[int] = [*engine.tokenizer(text)["input_ids"], 256]

        def only(response: Any) -> Any:
            return np.array(ids[len(response) : len(response) + 1])

        monkeypatch.setattr(
            Sampling,
            "sampling_params",
            lambda self, **given: dataclasses.replace(right(self, **given), prefix_allowed_tokens_fn=only),
        )

    return fix


def ask(client: openai.OpenAI, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 150} | more
    )


def shown(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.check(but=3)
@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        (CALL, None, [("look", {"x": 1})], "tool_calls"),
        (f"I look.\n{CALL}\n{CALL}", "I look.", [("look", {"x": 1})] * 2, "tool_calls"),
        (f"{CALL} and more", " and more", [("look", {"x": 1})], "tool_calls"),
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', ..., [], "stop"),
        ('<tool_call>{"name": "look", ', ..., [], "stop"),
        ("a <tool_ x", ..., [], "stop"),
        ("ends with <tool_", ..., [], "stop"),
    ],
)
def test_calls_are_told_from_text_whole_and_in_pieces(
    client: openai.OpenAI, say: Say, text: str, content: Any, calls: list[Any], reason: str
) -> None:
    say(text)
    content = text if content is ... else content
    (choice,) = ask(client).choices
    assert (choice.message.content, shown(choice.message), choice.finish_reason) == (content, calls, reason)
    streamed: list[tuple[str, str]] = []
    said, last = "", None
    for event in ask(client, stream=True):
        (piece,) = event.choices
        said, last = said + (piece.delta.content or ""), piece.finish_reason
        streamed += [(call.function.name, json.loads(call.function.arguments)) for call in piece.delta.tool_calls or []]
    assert (said or None, streamed, last) == (content, calls, reason)


def test_a_call_alone_where_calls_are_not_parallel_and_none_where_none_is_wanted(
    client: openai.OpenAI, say: Say
) -> None:
    say(CALL + CALL)
    (choice,) = ask(client, parallel_tool_calls=False).choices
    assert (shown(choice.message), choice.message.content) == ([("look", {"x": 1})], CALL)
    for more in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        (choice,) = ask(client, **more).choices
        assert (choice.message.tool_calls, choice.message.content) == (None, CALL + CALL)
        assert choice.finish_reason == "stop"
    (cut,) = ask(client, max_tokens=len(CALL) + 5).choices
    assert (shown(cut.message), cut.message.content, cut.finish_reason) == ([("look", {"x": 1})], "<tool", "length")


def test_a_conversation_of_calls_is_written_as_the_template_has_it(
    client: openai.OpenAI, say: Say, engine: NativeEngine
) -> None:
    """Arguments travel as JSON in a text, and templates write objects."""
    say(CALL)
    (choice,) = ask(client).choices
    spoken = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "content": "7", "tool_call_id": spoken["tool_calls"][0]["id"]}
    more = ask(client, messages=[{"role": "user", "content": "hi"}, spoken, result])
    assert engine.tokenizer is not None
    text = json.dumps(TOOLS) + "<tool_call></tool_call><user>hi<assistant>"
    text += '<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call><tool>7<assistant>'
    assert more.usage.prompt_tokens == len(engine.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("more", [{"echo": True}, {"best_of": 3}, {"echo": True, "logprobs": 1}])
def test_what_a_stream_cannot_do_is_refused(client: openai.OpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="`echo` and `best_of` are for answers in one piece") as refused:
        client.completions.create(model="tiny", prompt="ab", stream=True, max_tokens=3, **more)
    assert refused.value.type == "invalid_request_error"
    assert client.completions.create(model="tiny", prompt="ab", max_tokens=3, **more).choices


def test_nothing_that_is_written_is_lost(cases: int, engine: NativeEngine) -> None:
    """Any mixture of calls, marks and texts: what is no call is content, and a stream never takes back what it sent."""

    tokenizer = engine.tokenizer
    assert tokenizer is not None

    @settings(max_examples=max(cases, 50), deadline=None)
    @given(
        st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8),
        st.sampled_from([None, 0, 1]),
        st.sampled_from(sorted(FORMATS)),
    )
    def attack(pieces: list[str], most: int | None, form: str) -> None:
        text = "".join(pieces)
        _, content, calls, _ = read_turn(text, ["look"], FORMATS[form], most=most)
        assert most is None or len(calls) <= most
        for call in calls:
            assert call.name == "look"
            assert isinstance(json.loads(json.dumps(call.arguments)), dict)
        if not calls:
            assert content == text
        streamed = Streamed(tokenizer, form=FORMATS[form])
        for begin in range(0, len(text), size := max(len(text) // 40, 1)):
            streamed.add(tokenizer(text[begin : begin + size])["input_ids"])
            assert content.startswith(streamed.text)

    attack()
