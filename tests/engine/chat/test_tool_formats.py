"""Calls of tools in every form: as templates write them, as models vary them, and as they get them wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.chat.messages import assistant_message, find_format
from rolltree.engine.chat.reading import read_turn
from rolltree.engine.chat.tool_formats import FORMATS
from rolltree.engine.programs.chat.toolbox import tool_schema
from rolltree.engine.programs.chat.turns import ToolBox

from ...support import chat_templates as templates

SCHEMAS: dict[str, Any] = {
    "look": {
        "properties": {
            "where": {"type": "string"},
            "times": {"type": "integer"},
            "far": {"type": "boolean"},
            "share": {"type": "number"},
            "at": {"type": "array", "items": {"type": "integer"}},
            "how": {"type": "object"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        }
    },
    "rest": {"properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"} | some}}
         for name, some in SCHEMAS.items()]  # fmt: skip
ARGUMENTS: list[dict[str, Any]] = [
    {"where": "here"},
    {"where": "42", "times": 3},
    {"where": 'a "quoted"\nline', "far": True},
    {"where": "\u00fcber \u4f60\u597d", "share": 0.5, "far": False},
    {"at": [1, 2], "how": {"deep": [1, {"x": "y"}]}},
    {"where": "a < b > c </x> {y} [z]"},
]


def answered(message: Any) -> Any:
    """The answer of an environment with a calculator to a turn."""
    box = ToolBox({"tools": ["calculator"]})
    box.open([message], 10.0)
    return box.step([message])


def calls(text: str, form: str) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in read_turn(text, SCHEMAS, FORMATS[form]).calls]


TAUGHT = {"gptoss": "harmony", "glm4moe": "glm_xml", "llama3_1": "llama", "llama3_2": "llama", "muse_glimmer": "atem",
          "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "qwen3_vl": "hermes",
          "qwen3_5_think": "qwen_xml", "qwen3_5_nothink": "qwen_xml", "qwen3_6": "qwen_xml", "qwen3_8": "qwen_xml",
          "nemotron_3_nano": "qwen_xml", "nemotron_3_super": "qwen_xml", "nemotron_3_ultra": "qwen_xml",
          "nemotron_3_5_lightning": "qwen_xml", "lfm2_v2": "pythonic", "lfm2_2_5": "pythonic", "gemma4": "gemma",
          "deepseekv3": "deepseek", "deepseekv3_training": "deepseek"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TAUGHT if name in templates.names()])
def test_the_form_is_the_one_the_template_writes_and_its_calls_are_read_back(name: str) -> None:
    tokenizer = templates.tokenizer(name)
    form = find_format(tokenizer, TOOLS)
    assert form.name == TAUGHT[name]
    asked = [{"role": "user", "content": "?"}]
    for number, arguments in enumerate(ARGUMENTS):
        if form.name == "pythonic" and "how" in arguments:
            continue  # the template writes nested objects as JSON
        value = json.dumps(arguments) if name == "deepseekv3" else arguments
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": value}}
        both = [call] if name.startswith(("llama", "gptoss")) else [call, call | {"id": "abcdefghj"}]
        turn = {"role": "assistant", "content": "", "tool_calls": both}
        begun = tokenizer.apply_chat_template(asked, tools=TOOLS, tokenize=False)
        text = tokenizer.apply_chat_template([*asked, turn], tools=TOOLS, tokenize=False)[len(begun) :]
        assert calls(text, form.name) == [("look", arguments)] * len(both), (number, text)


BARE_XML = "<function=look><parameter=where>here</parameter><parameter=times>3</parameter></function>"
RIGHT: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"name": "look", "arguments": {"where": "</tool_call>"}}</tool_call>',
     [("look", {"where": "</tool_call>"})]),
    ("hermes", '<tool_call>\n{"name": "rest"}\n</tool_call>', [("rest", {})]),
    ("qwen_xml", f"<tool_call>{BARE_XML}</tool_call>", [("look", {"where": "here", "times": 3})]),
    ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=where>\n  two\nlines \n</parameter>\n</function>\n"
     "</tool_call>",
     [("look", {"where": "  two\nlines "})]),
    ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=where>\na</parameter>b\n</parameter>\n</function>\n"
     "</tool_call>",
     [("look", {"where": "a</parameter>b"})]),
    ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=far>\nTrue\n</parameter>\n<parameter=maybe>\nNone\n"
     "</parameter>\n</function>\n</tool_call>", [("look", {"far": True, "maybe": None})]),
    ("qwen_xml", "<tool_call>\n<function=rest>\n</function>\n</tool_call>", [("rest", {})]),
    ("qwen_xml", "<think>I would <tool_call> it</think>\n\n<tool_call>\n<function=rest>\n</function>\n</tool_call>",
     [("rest", {})]),
    ("glm_xml", "<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>42</arg_value>\n<arg_key>times</arg_key>\n"
     "<arg_value>42</arg_value>\n</tool_call>", [("look", {"where": "42", "times": 42})]),
    ("glm_xml", "<tool_call>look<arg_key>where</arg_key><arg_value> a\n</tool_call>b</arg_value></tool_call>",
     [("look", {"where": " a\n</tool_call>b"})]),
    ("glm_xml", "<tool_call>rest</tool_call>", [("rest", {})]),
    ("llama", '{"name": "look", "parameters": {"where": "here"}}', [("look", {"where": "here"})]),
    ("llama", '<|python_tag|>{"name": "rest", "parameters": {}}; {"name": "rest", "parameters": {}}',
     [("rest", {})] * 2),
    ("llama", '{"name":"look","arguments":{"times":3}}', [("look", {"times": 3})]),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"times": 3}, "id": "abcdefghi"}, {"name": "rest"}]',
     [("look", {"times": 3}), ("rest", {})]),
    ("mistral", '[TOOL_CALLS]look[ARGS]{"times": 3}[TOOL_CALLS]rest[CALL_ID]abcdefghi[ARGS]{}',
     [("look", {"times": 3}), ("rest", {})]),
    ("mistral", '[TOOL_CALLS]look{"where": "[TOOL_CALLS]"}', [("look", {"where": "[TOOL_CALLS]"})]),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"times": 3}<｜tool▁call▁end｜>'
     "<｜tool▁calls▁end｜>",
     [("look", {"times": 3})]),
    ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"where": "```"}\n```<｜tool▁call▁end｜>',
     [("look", {"where": "```"})]),
    ("harmony", '<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look '
     '<|constrain|>json<|message|>{"times": 3}', [("look", {"times": 3})]),
    ("harmony", ' to=functions.look<|channel|>commentary json<|message|>{"where": "a"}<|call|>',
     [("look", {"where": "a"})]),
    ("pythonic", "<|tool_call_start|>[look(where='a', far=true, at=[1, 2], maybe=None), rest()]<|tool_call_end|>",
     [("look", {"where": "a", "far": True, "at": [1, 2], "maybe": None}), ("rest", {})]),
    ("gemma", '<|tool_call>call:look{at:[1,2],where:<|"|>a, b: {c}<|"|>,how:{x:true}}<tool_call|>',
     [("look", {"at": [1, 2], "where": "a, b: {c}", "how": {"x": True}})]),
    ("gemma", '<|tool_call>call:look{where:<|"|><tool_call|><|"|>}<tool_call|>', [("look", {"where": "<tool_call|>"})]),
    ("atem", '<atem:function_calls>\n<atem:invoke name="look">\n<atem:parameter name="where"> a </atem:parameter>\n'
     "</atem:invoke>\n</atem:function_calls>", [("look", {"where": " a "})]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "wanted"), RIGHT)
def test_calls_as_models_vary_them(form: str, text: str, wanted: list[tuple[str, Any]]) -> None:
    assert calls(text, form) == wanted
    assert not read_turn(text, SCHEMAS, FORMATS[form]).malformed
    message = assistant_message(read_turn(f"Well. {text}", SCHEMAS, FORMATS[form]), SCHEMAS)
    assert message["content"].startswith("Well.")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == wanted


WRONG: list[tuple[str, str, int]] = [
    ("hermes", "<tool_call>{", 1),
    ("hermes", '<tool_call>{"name": "look", "arguments": {}}', 1),
    ("hermes", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "look", "arguments": "x"}</tool_call><tool_call>[]</tool_call>', 2),
    ("hermes", "<tool_call>" + "[" * 9000 + "</tool_call>", 1),
    ("hermes", f"<tool_call>{BARE_XML}</tool_call>", 1),
    ("qwen_xml", '<tool_call>{"name": "look", "arguments": {}}</tool_call>', 1),
    ("qwen_xml", "<tool_call><function=fly></function></tool_call>", 1),
    ("qwen_xml", "<tool_call><function=look><parameter=where>a</function></tool_call>", 1),
    ("qwen_xml", "<tool_call><function=look><parameter=times>many</parameter></function></tool_call>", 1),
    ("qwen_xml", f"<tool_call>{BARE_XML}", 1),
    ("glm_xml", "<tool_call>fly</tool_call>", 1),
    ("glm_xml", "<tool_call>look<arg_key>times</arg_key></tool_call>", 1),
    ("glm_xml", "<tool_call>look<arg_key>times</arg_key><arg_value>x</arg_value></tool_call>", 1),
    ("llama", '{"name": "fly", "parameters": {}}', 1),
    ("llama", '{"name": "look", "parameters": {', 1),
    ("llama", '<|python_tag|>look.call(where="a")', 1),
    ("mistral", "[TOOL_CALLS] look", 1),
    ("mistral", '[TOOL_CALLS] [{"name": "fly"}, 3]', 2),
    ("mistral", "[TOOL_CALLS] []", 1),
    ("deepseek", "<｜tool▁call▁begin｜>look<｜tool▁call▁end｜>", 1),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}<｜tool▁call▁end｜>", 1),
    ("harmony", " to=functions.fly<|channel|>commentary json<|message|>{}", 1),
    ("harmony", " to=functions.look<|channel|>commentary json<|message|>{'where'", 1),
    ("pythonic", "<|tool_call_start|>[look('a')]<|tool_call_end|>", 1),
    ("pythonic", "<|tool_call_start|>[look(where=a), rest(]<|tool_call_end|>", 1),
    ("pythonic", "<|tool_call_start|>[fly(), look(where=open('x'))]<|tool_call_end|>", 2),
    ("pythonic", "<|tool_call_start|>[rest()]", 1),
    ("gemma", "<|tool_call>call:look{where:a}<tool_call|>", 1),
    ("gemma", "<|tool_call>call:look{}", 1),
    ("atem", "<atem:function_calls></atem:function_calls>", 1),
]


@pytest.mark.parametrize(("form", "text", "errors"), WRONG)
def test_what_is_no_call_is_answered_by_an_error_each(form: str, text: str, errors: int) -> None:
    message = assistant_message(read_turn(text, SCHEMAS, FORMATS[form]), SCHEMAS)
    assert "tool_calls" not in message
    assert message["content"] == text
    found = answered(message)
    assert not found.done
    assert [said["role"] for said in found.messages] == ["tool"] * errors
    assert all(said["content"].startswith("error: ") for said in found.messages)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_is_no_call(form: str) -> None:
    said = ("72", "", "The answer is {72}.", '{"answer": 72}', '{"name": "Bob"}', "a [list] of <b>things</b>", "x to=y")
    for text in said:
        message = assistant_message(read_turn(text, SCHEMAS, FORMATS[form]), SCHEMAS)
        assert message == {"role": "assistant", "content": text}
        assert answered(message).done


def test_errors_and_results_come_in_the_order_of_the_calls() -> None:
    one = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
    text = f"{one % '1+1'}<tool_call>no</tool_call>{one % '2+2'}"
    found = answered(assistant_message(read_turn(text, ["calculator"]), ["calculator"]))
    no_call = "error: that is no call of a tool; there are calculator"
    assert [(said["content"], said["tool_call_id"]) for said in found.messages] == [
        ("2", "call00000"), (no_call, "call00001"), ("4", "call00002"),
    ]  # fmt: skip


def test_bare_numbers_stay_texts_where_the_schema_says_so() -> None:
    """`calculator` takes a text; 72 is one."""
    call = "<tool_call>\n<function=calculator>\n<parameter=expression>\n72\n</parameter>\n</function>\n</tool_call>"
    schema = tool_schema("calculator")["function"]
    for tools in (["calculator"], {"calculator": schema["parameters"]}):
        message = assistant_message(read_turn(call, tools, FORMATS["qwen_xml"]), tools)
        assert message["tool_calls"][0]["function"]["arguments"] == {"expression": "72"}
        assert answered(message).messages[0]["content"] == "72"


def test_forms_that_nobody_knows_are_refused_with_the_known_ones() -> None:
    bare = "{% for m in messages %}{{ m.role }}{{ m.content }}</s>{% endfor %}"
    tokenizer = templates.byte_tokenizer(bare, ("</s>",))
    with pytest.raises(ValueError, match=r"no known form .*qwen_xml, glm_xml.*tool_format"):
        find_format(tokenizer, TOOLS)
    with pytest.raises(ValueError, match=r"no tool_format 'xml'; known are .*hermes"):
        find_format(tokenizer, TOOLS, "xml")
    assert find_format(tokenizer, TOOLS, "mistral").name == "mistral"
    tokenizer.chat_template = "{% if tools %}[TOOL_CALLS]{% endif %}" + str(tokenizer.chat_template)
    assert find_format(tokenizer, TOOLS).name == "mistral"


@pytest.mark.parametrize(
    ("name", "form"), [("deepseek_r1_distill", "deepseek"), ("deepseek_r1_distill_training", "deepseek")]
)
def test_a_template_that_writes_calls_of_no_content_only_is_read_by_its_text(name: str, form: str) -> None:
    if name not in templates.names():
        pytest.skip("TRL is not installed")
    assert find_format(templates.tokenizer(name), TOOLS).name == form


def test_the_text_of_a_template_does_not_count_where_it_writes_calls_otherwise() -> None:
    body = (
        "{% for m in messages %}{% if m.tool_calls and {} %}<tool_call>{{ m.tool_calls[0].function.name }}!"
        "</tool_call>{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    )
    never = templates.byte_tokenizer(body.replace("{}", "m.number"), ("</s>",))
    assert find_format(never, TOOLS).name == "hermes"
    always = templates.byte_tokenizer(body.replace("{}", "true"), ("</s>",))
    with pytest.raises(ValueError, match="no known form"):
        find_format(always, TOOLS)


def test_no_text_breaks_a_parser() -> None:
    """Any mixture of marks, calls and texts: nothing raises, and what is no call stays content."""
    marks = [text for _, text, *_ in RIGHT] + [text for _, text, *_ in WRONG if len(text) < 200]
    marks += [mark for form in FORMATS.values() for mark in form.tokens]
    pieces = st.sampled_from([*marks, "</think>", "}", '"'])

    @settings(max_examples=100, deadline=None)
    @given(st.lists(pieces | st.text(max_size=4), max_size=5), st.sampled_from(sorted(FORMATS)))
    def attack(some: list[str], form: str) -> None:
        text = "".join(some)
        said = read_turn(text, SCHEMAS, FORMATS[form])
        assert all(call.name in SCHEMAS and isinstance(call.arguments, dict) for call in said.calls)
        if not said.calls:
            assert said.content == text

    attack()
