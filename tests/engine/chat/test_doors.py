"""Environments, agents, three protocols and data read and write the same, with every template that TRL installs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rolltree.engine.agents.session import Session
from rolltree.engine.chat.messages import assistant_message, find_format
from rolltree.engine.chat.reading import read_ids
from rolltree.engine.chat.writing import complete, plain
from rolltree.engine.data.segment import LeafStatus
from rolltree.engine.errors import UserError
from rolltree.engine.prompts.prompts import make_prompts
from rolltree.engine.protocols.calls import CHATS, read_call
from rolltree.engine.protocols.prompts import chat_prompt
from rolltree.engine.rollout import Completion
from rolltree.engine.settings import DataConfig
from rolltree.engine.tasks import Problem

from ...support import chat_templates as templates

needs_trl = pytest.mark.skipif(not templates.names(), reason="TRL is not installed: pip install rolltree[trl]")
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm_xml": "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    '```json\n{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma": "<|tool_call>call:look{x:1}<tool_call|>",
    "atem": '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="x">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "harmony": HARMONY + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"x": 1}}]',
    "pythonic": "<|tool_call_start|>[look(x=1)]<|tool_call_end|>",
    "llama": '{"name": "look", "parameters": {"x": 1}}',
}
SAID = "Well: {1, 2}, to=5 <tool_calls> [x] ü."


def body(path: str) -> bytes:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    if path == "/v1/responses":
        asked = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
    elif path == "/v1/messages":
        asked["tools"] = [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}]
    else:
        asked["tools"] = TOOLS
    return json.dumps(asked).encode()


def completion(ids: list[int]) -> Completion:
    none = np.zeros(len(ids), np.float32)
    tokens = np.array(ids, np.int32)
    return Completion(tokens, none.astype(np.int8), none, none, none, tokens, [], None, LeafStatus.STOP, None)


def read_at(path: str, tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[str, str, list[Any]]:
    """Read through the form of a protocol, whole; what a stream tells a token at a time is a beginning of it."""
    form = read_call(path, body(path)).form(tokenizer, "m", ())
    form.asked([0])
    done = completion(ids)
    answer = form.read(done)
    choice = form.streamed()
    for token in ids:
        choice.add([token])
    rest = form.rest(choice, answer)
    assert rest is not None
    assert choice.text + rest.text == answer.text
    assert choice.reasoning + rest.reasoning == answer.reasoning
    assert form.whole([[0]], [[done]])
    assert "rror" not in form.last(0, choice, done, [[0]]).replace('"error": null', "")
    return answer.reasoning, answer.text, [(call.name, json.loads(call.arguments)) for call in answer.calls]


@needs_trl
@pytest.mark.check(but=12)
@pytest.mark.parametrize("name", templates.names())
def test_every_door_reads_a_turn_alike(name: str) -> None:
    tokenizer = templates.tokenizer(name)
    try:
        form = find_format(tokenizer, TOOLS)
    except ValueError:
        form = None
    turns = [(SAID, [])] if form is None else [(SAID, []), (WRITTEN[form.name], [("look", {"x": 1})])]
    if form is not None and form.name == "harmony":
        turns.append((f"{HARMONY}<|channel|>final<|message|>{SAID}", []))
    for text, calls in turns:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        turn = read_ids(tokenizer, ids, {"look": PARAMETERS}, form)
        message = assistant_message(turn, ["look"])
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])] == calls
        assert message["content"] == ("" if calls else SAID)
        assert turn.reasoning == ("hm" if "analysis" in text else "")
        for path in CHATS:
            assert read_at(path, tokenizer, ids) == (turn.reasoning, turn.content, calls)


CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "developer", "content": "BANANA"}, {"role": "user", "content": "CHERRY"}],
    [{"role": "system", "content": "F"}, {"role": "developer", "content": "BANANA"}, {"role": "user", "content": "C"}],
    [{"role": "user", "content": "APPLE"}, {"role": "assistant", "content": None}, {"role": "user", "content": "FIG"}],
    [{"role": "user", "content": "A"}, {"role": "sytem", "content": "BANANA"}, {"role": "user", "content": "C"}],
    [{"role": "user", "content": "A", "name": "DATE"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "BANANA", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00000", "content": "CHERRY"},
    ],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "BANANA", "reasoning_content": "DATE"},
        {"role": "user", "content": "CHERRY"},
    ],
]  # fmt: skip
"""Conversations with texts that some templates leave out."""


@needs_trl
@pytest.mark.slow(but=2)
@pytest.mark.check(but=2)
@pytest.mark.parametrize("number", range(len(TALKS)))
def test_every_door_writes_a_conversation_alike_and_whole(number: int) -> None:
    talk = TALKS[number]
    for name in templates.names():
        tokenizer = templates.tokenizer(name)
        if "vl" in name or name.startswith(("idefics", "llava", "smolvlm", "diffusion")):
            continue  # templates of models with pictures, which take parts
        found: list[list[int] | None] = []
        try:
            sent = json.dumps({"messages": talk}).encode()
            found.append(chat_prompt(tokenizer, read_call("/v1/chat/completions", sent).chat).ids)
        except ValueError:
            found.append(None)
        try:
            session = Session(tokenizer, [tokenizer.eos_token_id], [], 0)
            found.append(session.begin(plain(talk)).prompt)
        except ValueError:
            found.append(None)
        try:
            problem = Problem("p/0", "p", "?", {"answer": "1"}, tuple(plain(talk)), ())
            (prompt,) = make_prompts(
                [problem], DataConfig(path="p.jsonl", chat=True, max_prompt_tokens=4096), tokenizer
            )
            found.append(prompt.token_ids)
        except UserError:
            found.append(None)
        assert found[0] == found[1] == found[2], name
        if found[0] is not None:
            text = tokenizer.decode(found[0])
            words = [m[key] for m in talk for key in ("content", "name") if len(m.get(key) or "") > 1]
            assert [word for word in words if word not in text] == [], name


def test_what_a_template_leaves_out_is_refused_by_its_field() -> None:
    written = "{% for m in messages %}<{{ m.role }}>{% if not m.tool_calls %}{{ m.content }}{% endif %}</s>{% endfor %}"
    tokenizer = templates.byte_tokenizer(written, ("</s>",))
    asked = {"role": "user", "content": "hi"}
    for message, field in (
        ({"role": "assistant", "content": "x", "tool_calls": [CALL]}, "content"),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "reasoning_content": "why"}, "reasoning_content"),
        ({"role": "user", "content": "x", "name": "Ada"}, "name"),
    ):
        with pytest.raises(ValueError, match=f"^message 1 \\({message['role']}\\) has '{field}', which the chat templ"):
            complete(tokenizer, plain([asked, message, asked]))
    for fine in ({"role": "user", "content": "x", "name": "user"}, {"role": "assistant", "content": ""}):
        assert complete(tokenizer, plain([asked, fine, asked])).text.count("</s>") == 3
    with pytest.raises(ValueError, match=r"^message 0 has the unknown role 'sytem'; use system, developer, user"):
        complete(tokenizer, [{"role": "sytem", "content": "x"}])


@needs_trl
def test_a_developer_is_the_system_where_the_template_writes_none() -> None:
    talk = [{"role": "developer", "content": "BANANA"}, {"role": "user", "content": "hi"}]
    assert "<|im_start|>system\nBANANA<|im_end|>" in complete(templates.tokenizer("qwen3"), talk).text
    assert (
        "<|start_header_id|>developer<|end_header_id|>\n\nBANANA" in complete(templates.tokenizer("llama3"), talk).text
    )
    both = plain([{"role": "system", "content": "APPLE"}, *talk])
    assert "<|im_start|>system\nAPPLE\n\nBANANA<|im_end|>" in complete(templates.tokenizer("qwen3_5_think"), both).text


@needs_trl
def test_reasoning_that_a_template_drops_by_design_is_let() -> None:
    """Qwen 3 writes the reasoning of the turns after the last question alone."""
    tokenizer = templates.tokenizer("qwen3")
    thought = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    asked = {"role": "user", "content": "hi"}
    assert "why" not in complete(tokenizer, plain([asked, thought, asked])).text
    with pytest.raises(ValueError, match="has 'reasoning_content'"):
        complete(templates.tokenizer("qwen2_5"), plain([asked, thought, asked]))
