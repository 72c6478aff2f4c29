"""Bodies of Responses and of Anthropic's messages are the chats that they mean, or are refused by a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rolltree.engine.protocols.answers import Answer, Called
from rolltree.engine.protocols.calls import read_call, refusal
from rolltree.engine.protocols.keys import key_of, same_key
from rolltree.engine.protocols.prompts import plain_messages
from rolltree.engine.protocols.responses import ResponseForm

from ...support.serving import tokenizer

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi\nthere"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "7", "name": "look"},
    {"role": "tool", "tool_call_id": "c2", "content": "error: none", "name": "look"},
    {"role": "user", "content": "and?"},
]
"""One conversation, which each protocol spells in its own way."""
TEXT = '{"x": 1}'
AS_CHAT = [
    *({"role": m["role"], "content": m["content"]} for m in TALK[:2]),
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": id_, "type": "function", "function": {"name": "look", "arguments": TEXT}} for id_ in ("c1", "c2")
        ],
    },
    *({"role": "tool", "tool_call_id": m["tool_call_id"], "content": m["content"]} for m in TALK[3:5]),
    TALK[5],
]
AS_RESPONSE: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "there"}]},
        {
            "type": "message", "role": "assistant", "id": "m", "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": TEXT, "id": "f", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": TEXT},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "error: none"}]},
        {"role": "user", "content": "and?"},
    ],
}  # fmt: skip
NONE = {"type": "text", "text": "none"}
AS_MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}},
                {"type": "tool_use", "id": "c2", "name": "look", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "7"},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [NONE]},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
}  # fmt: skip


def read(path: str, body: Any) -> Any:
    return read_call(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": AS_CHAT}),
        ("/v1/responses", AS_RESPONSE),
        ("/v1/messages", AS_MESSAGES),
    ],
)
def test_one_conversation_is_the_same_in_every_protocol(path: str, body: Any) -> None:
    assert plain_messages(read(path, body).chat) == TALK


def test_options_mean_the_same() -> None:
    tool = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
    sampling = {"temperature": 0.5, "top_p": 0.9, "stream": True, "model": "m"}
    response = {
        "input": "hi", "tools": [{"type": "function", "strict": True, **tool}], "max_output_tokens": 7,
        "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False, **sampling,
        "reasoning": {"effort": "low"}, "text": {"verbosity": "high"}, "stop": ["x"],
    }  # fmt: skip
    messages = {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "stop_sequences": ["x"], **sampling,
        "tools": [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    }  # fmt: skip
    for path, body in (("/v1/responses", response), ("/v1/messages", messages)):
        chat = read(path, body).chat
        assert (chat.temperature, chat.top_p, chat.stream, chat.stop, chat.model) == (0.5, 0.9, True, ["x"], "m")
        assert chat.max_completion_tokens or chat.max_tokens == 7
        assert chat.tool_choice.function.name == "look"
        assert chat.parallel_tool_calls is False
        assert [t.function.name for t in chat.tools] == ["look"]
        assert chat.tools[0].function.parameters == PARAMETERS
    assert read("/v1/responses", response).chat.reasoning_effort == "low"
    assert read("/v1/responses", response).chat.verbosity == "high"
    forced = {**messages, "tool_choice": {"type": "any"}}
    assert read("/v1/messages", forced).chat.tool_choice == "required"


def test_turns_of_the_assistant_are_told_apart() -> None:
    """Two messages are two turns; a call without a message is a turn; an answer of a tool ends one."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "developer", "content": "c"},
    ]
    talk = plain_messages(read("/v1/responses", {"input": items}).chat)
    said = [(m["role"], m["content"], len(m.get("tool_calls", []))) for m in talk]
    assert said == [
        ("user", "a", 0), ("assistant", "", 1), ("tool", "x", 0), ("assistant", "", 1), ("tool", "y", 0),
        ("assistant", "one", 0), ("assistant", "two", 0), ("developer", "c", 0),
    ]  # fmt: skip


USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "look", "parameters": PARAMETERS}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL, TOOL | {"name": "add"}]}
PROVIDER = "`tools.0` is of type 'bash_1', a tool of a provider"
PROVIDERS = "`tools.{}` is of type '{}', a tool of a provider; this server calls functions only: leave it out."
SAID = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "send the whole conversation as `input`"),
        ("/v1/responses", {"input": "x", "conversation": {"id": "c"}}, "send the whole conversation as `input`"),
        ("/v1/responses", {"input": []}, "`input"),
        ("/v1/responses", {}, "`input`: Field required"),
        ("/v1/responses", {"input": "x", "tools": [TOOL, {"type": "web_search"}]}, PROVIDERS.format(1, "web_search")),
        ("/v1/responses", {"input": "x", "tools": [SPACE | {"tools": [{"type": "x"}]}]}, "`tools.0.tools.0` is of"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "a tool whose input is no JSON"),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "mcp"}]}, PROVIDERS.format(0, "mcp")),
        ("/v1/chat/completions", {"messages": USER, "web_search_options": {}}, "`web_search_options`"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "is of type 'item_reference'"),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [{}]}]}, "parts are no texts"),
        ("/v1/responses", {"input": [{"content": "x"}]}, "`input.0` is of type 'message'"),
        ("/v1/responses", {"input": [{"role": "user", "content": 3}]}, "neither a text nor a list of parts"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "type 'input_image'"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "and `arguments`"),
        ("/v1/responses", {"input": "x", "background": True}, "`background`"),
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "include.0"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "needs a `name` and a `schema`"),
        ("/v1/messages", {"messages": USER}, "`max_tokens`: Field required"),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, "`messages`"),
        ("/v1/messages", {"messages": [*USER, SAID], "max_tokens": 1}, "end with a user"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "'image'"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 1},
            "needs `tool_use_id`",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *USER], "max_tokens": 1},
            "needs `id`, `name` and `input`",
        ),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "tool"}}, "needs a `name`"),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "tools": [{"type": "bash_1"}]}, PROVIDER),
        ("/v1/messages", {"messages": USER, "max_tokens": 1, "unknown": 1}, "`unknown`"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_a_sentence(path: str, body: Any, said: str) -> None:
    with pytest.raises(ValueError) as wrong:  # noqa: PT011
        read(path, body)
    assert said in str(wrong.value)
    assert str(wrong.value).endswith(".")


def test_thinking_that_is_asked_for_is_named_as_ignored() -> None:
    body = {"messages": USER, "max_tokens": 1}
    assert read("/v1/messages", body | {"thinking": {"type": "disabled"}}).ignored == ()
    assert read("/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": 9}}).ignored == ("thinking",)


TELLS = {
    "user": "u", "metadata": {"run": 1}, "client_metadata": {"x-codex-turn-metadata": "{}"}, "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"}, "session_id": "s",
}  # fmt: skip
"""Fields that tell who asks, and change no answer."""
ASKS = {
    "/v1/chat/completions": {"messages": USER}, "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 1}, "/v1/messages/count_tokens": {"messages": USER},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKS)
def test_what_only_tells_who_asks_changes_nothing(path: str) -> None:
    plain, told = read(path, ASKS[path]), read(path, ASKS[path] | TELLS)
    assert told.ignored == plain.ignored
    assert plain_messages(told.chat) == plain_messages(plain.chat)
    with pytest.raises(ValueError, match="moderation"):
        read(path, ASKS[path] | {"moderation": {"model": "m"}})


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[1, -1e400]"])
def test_a_number_that_is_none_is_refused(number: str) -> None:
    for path, body in ASKS.items():
        raw = json.dumps(body | {"metadata": {"a": 0}}).replace('"a": 0', f'"a": {number}').encode()
        with pytest.raises(ValueError, match="which is no finite one"):
            read_call(path, raw)


def test_functions_of_a_namespace_are_functions() -> None:
    """By their own names, where no other has it; calls go back with their namespace, and come again with it."""
    other = SPACE | {"name": "files", "description": None, "tools": [TOOL]}
    call = {"type": "function_call", "call_id": "c", "arguments": "{}", "namespace": "crm"}
    said = [{"role": "user", "content": "hi"}, call | {"name": "add"}, call | {"name": "look", "call_id": "d"}]
    asked = read("/v1/responses", {"input": said, "tools": [TOOL, SPACE, other]})
    functions = [tool.function for tool in asked.chat.tools]
    assert [f.name for f in functions] == ["look", "crm.look", "add", "files.look"]
    assert [f.description for f in functions] == [None, "Customers.", None, None]
    assert [c["function"]["name"] for c in plain_messages(asked.chat)[1]["tool_calls"]] == ["add", "crm.look"]
    form = ResponseForm(tokenizer(), "m", asked.body, ())
    called = [Called(f"c{i}", f.name, "{}") for i, f in enumerate(functions)]
    items = form._items(Answer("", called, "tool_calls"))
    assert [(i["name"], i.get("namespace")) for i in items] == [
        ("look", None), ("look", "crm"), ("add", "crm"), ("look", "files")
    ]  # fmt: skip


def test_errors_have_the_form_of_their_protocol() -> None:
    assert refusal("/v1/messages", "No.", 429) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "No."},
    }
    assert refusal("/v1/responses", "No.", 400, "x")["error"] == {
        "message": "No.", "type": "invalid_request_error", "param": None, "code": "x"
    }  # fmt: skip


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """A body with one of its values, at any depth, replaced by something else."""
    if isinstance(value, dict) and value:
        one = st.sampled_from(sorted(value)).flatmap(
            lambda key: mutations(value[key]).map(lambda changed: {**value, key: changed})
        )
        return one | ANYTHING
    if isinstance(value, list) and value:
        one = st.integers(0, len(value) - 1).flatmap(
            lambda at: mutations(value[at]).map(lambda changed: [*value[:at], changed, *value[at + 1 :]])
        )
        return one | ANYTHING
    return ANYTHING


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.check
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_body_is_read_or_refused(data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from([("/v1/responses", AS_RESPONSE), ("/v1/messages", AS_MESSAGES)]))
    changed = data.draw(mutations(body))
    said = "."
    try:
        plain_messages(read(path, changed).chat)
    except ValueError as wrong:
        said = str(wrong)
    assert said.endswith(".")


def test_a_key_is_read_as_each_client_sends_it() -> None:
    for headers, key in (
        ({"authorization": "Bearer k"}, b"k"),
        ({"authorization": "bearer  k "}, b"k"),
        ({"x-api-key": "k"}, b"k"),
        ({"authorization": "Basic k"}, b""),
        ({"authorization": "k"}, b""),
        ({}, b""),
    ):
        assert key_of(Headers(headers)) == key
    assert same_key(b"k", b"k")
    assert not same_key(b"", b"k")
