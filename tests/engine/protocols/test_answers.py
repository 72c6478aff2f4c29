"""Answers as clients get them: stop texts where the engine found them, reasoning apart, calls whole or none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolltree.engine.protocols.calls import CHATS, read_call
from rolltree.engine.protocols.prompts import plain_messages
from rolltree.engine.rollout.completions import find_stop

from ...support import chat_templates as templates
from ..chat.test_doors import HARMONY, body, completion, read_at

MARKS = "{% for m in messages %}[INST]{{ m.content }}{% endfor %}<pad><stop>"


def tokenizer() -> Any:
    made = templates.byte_tokenizer(MARKS, ("</s>",))
    made.add_special_tokens({"additional_special_tokens": ["<pad>", "<stop>"]})
    return made


def form_of(path: str, made: Any, stop: tuple[str, ...] = (), **more: Any) -> Any:
    return read_call(path, json.dumps(json.loads(body(path)) | more).encode()).form(made, "m", stop)


@pytest.mark.parametrize(
    ("text", "stops", "told", "stop"),
    [
        ("the quick", ["ick", "quick"], "the ", "quick"),
        ("hello<stop>", ["<stop>"], "hello", "<stop>"),
        ("xxa<pad>byy", ["ab"], "xxabyy", None),
        ("xa<pad>b", ["a<pad>b"], "x", "a<pad>b"),
    ],
)
def test_an_answer_is_cut_where_the_engine_found_a_stop_text(
    text: str, stops: list[str], told: str, stop: str | None
) -> None:
    made = tokenizer()
    ids = made(text, add_special_tokens=False)["input_ids"]
    done = replace(completion(ids), stop=find_stop(made, np.array(ids), stops))
    answer = form_of(CHATS[0], made, tuple(stops)).read(done)
    assert (answer.text, answer.stop, answer.reason) == (told, stop, "stop")


@pytest.mark.parametrize(
    ("text", "stop", "reason", "calls"),
    [('{"x": 1}', None, "tool_calls", 1), ('{"x": 1e999}', None, "length", 0), ('{"x": 1}', "}", "stop", 0)],
)
def test_a_forced_call_is_whole_or_none(text: str, stop: str | None, reason: str, calls: int) -> None:
    made = tokenizer()
    forced = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    form = form_of(CHATS[0], made, **forced)
    ids = made(text, add_special_tokens=False)["input_ids"]
    done = replace(completion(ids), stop=find_stop(made, np.array(ids), [stop] if stop else []))
    (choice,) = form.whole([[0]], [[done]])["choices"]
    assert (choice["finish_reason"], len(choice["message"].get("tool_calls", []))) == (reason, calls)
    message = form_of("/v1/messages", made, tool_choice={"type": "tool", "name": "look"}).whole([[0]], [[done]])
    assert message["stop_reason"] == {"tool_calls": "tool_use", "length": "max_tokens", "stop": "stop_sequence"}[reason]


@pytest.mark.skipif(not templates.names(), reason="TRL is not installed: pip install rolltree[trl]")
def test_reasoning_between_special_tokens_is_a_field_of_its_own() -> None:
    made = templates.byte_tokenizer(templates.template("gptoss"), templates.ends("gptoss"))
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    made.add_special_tokens({"additional_special_tokens": marks})
    ids = made(f"{HARMONY}<|channel|>final<|message|>Yes", add_special_tokens=False)["input_ids"]
    for path in CHATS:
        assert read_at(path, made, ids) == ("hm", "Yes", [])
    chat, response, message = (form_of(path, made).whole([[0]], [[completion(ids)]]) for path in CHATS)
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [
        ("reasoning", "hm"), ("message", "Yes"),
    ]  # fmt: skip
    assert [(b["type"], b.get("thinking", b.get("text"))) for b in message["content"]] == [
        ("thinking", "hm"), ("text", "Yes"),
    ]  # fmt: skip


def test_reasoning_comes_back_and_turns_of_a_user_are_one() -> None:
    asked = {"role": "user", "content": "a"}
    items = [asked, {"type": "reasoning", "content": [{"text": "hm"}]}, {"role": "assistant", "content": "b"}, asked]
    sent = read_call("/v1/responses", json.dumps({"input": items}).encode())
    assert [m.get("reasoning_content") for m in plain_messages(sent.chat)] == [None, "hm", None]
    said = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]}
    turns = {"messages": [asked, asked, said, asked], "max_tokens": 1}
    talk = plain_messages(read_call("/v1/messages", json.dumps(turns).encode()).chat)
    assert [m["content"] for m in talk] == ["a\n\na", "b", "a"]
    assert talk[1]["reasoning_content"] == "hm"
    with pytest.raises(ValueError, match="no content of a user"):
        read_call("/v1/messages", b'{"messages": [{"role": "user", "content": []}], "max_tokens": 1}')
