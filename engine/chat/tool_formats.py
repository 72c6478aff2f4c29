"""The forms in which models write calls of tools, one parser each.

A parser finds the calls of a turn in the order they were written. What opens as a call and cannot be read is a
`Malformed`, never silence; what opens no call is text. Arguments that a form writes as bare text get the type that the
tool's JSON schema gives them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .call_reading import ARGUMENTS, Found, Malformed, Schemas, ToolCall, checked, enclosed, read, typed
from .reasoning import harmony_messages
from .schemas import MalformedError, read_json, read_object


@dataclass(frozen=True)
class ToolFormat:
    """A form of calls.

    Args:
        head: a pattern of the beginning of a call, as far as it can be told from other text; a turn in which it is not
            found calls nothing.
        find: finds the calls of a text, in their order.
        taught: a pattern that holds for the prompts of templates that teach this form and no other.
        tokens: marks that are special tokens of some tokenizers.
    """

    name: str
    head: str
    find: Callable[[str, Schemas], Iterator[Found]]
    taught: str
    tokens: tuple[str, ...]


def _hermes(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``{"name": "f", "arguments": {"x": 1}}``."""
    value, end = read_json(text, at)
    return checked(value, tools), end


FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
FUNCTION_END = re.compile(r"\s*</function>")


def _qwen_xml(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``<function=f> <parameter=x> 1 </parameter> </function>``, each on lines of their own."""
    head = FUNCTION.match(text, at)
    if head is None:
        raise MalformedError
    at, texts = head.end(), {}
    while (parameter := PARAMETER.match(text, at)) is not None:
        texts[parameter[1].strip()] = _line(parameter[2])
        at = parameter.end()
    closing = FUNCTION_END.match(text, at)
    if closing is None:
        raise MalformedError
    return typed(head[1].strip(), texts, tools), closing.end()


def _line(text: str) -> str:
    """Return ``text`` without the line ends that set it apart."""
    return text.removeprefix("\n").removesuffix("\n")


GLM_NAME = re.compile(r"\s*([^\s<]+)")
GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))", re.DOTALL
)


def _glm_xml(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``f <arg_key>x</arg_key> <arg_value>1</arg_value>``."""
    head = GLM_NAME.match(text, at)
    if head is None:
        raise MalformedError
    at, texts = head.end(), {}
    while (argument := GLM_ARGUMENT.match(text, at)) is not None:
        texts[argument[1].strip()] = argument[2]
        at = argument.end()
    return typed(head[1], texts, tools), at


DEEPSEEKS = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = re.compile(r"\s*(?:function<｜tool▁sep｜>([^\n<]+)\n\s*```json|([^<\n]+)<｜tool▁sep｜>)")
FENCE = re.compile(r"\s*```")


def _deepseek(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``function<｜tool▁sep｜>f`` and JSON in a fence (V3, R1), or ``f<｜tool▁sep｜>{...}`` (V3.1)."""
    head = DEEPSEEK.match(text, at)
    if head is None:
        raise MalformedError
    arguments, end = read_json(text, head.end())
    if head[1] is not None:
        fence = FENCE.match(text, end)
        if fence is None:
            raise MalformedError
        end = fence.end()
    return checked({"name": (head[1] or head[2]).strip(), "arguments": arguments}, tools), end


GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
GEMMA_HEAD = re.compile(r"\s*call:([^\s{]+)\s*")
GEMMA_QUOTE = '<|"|>'


def _gemma(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``call:f{x:1,y:<|"|>text<|"|>}``: JSON with bare keys and its own quotation marks."""
    head = GEMMA_HEAD.match(text, at)
    closed = text.find("<tool_call|>", at)
    while closed >= 0 and text.count(GEMMA_QUOTE, at, closed) % 2:  # it stands in a text
        closed = text.find("<tool_call|>", closed + 1)
    if head is None or closed < 0:
        raise MalformedError
    parts = text[head.end() : closed].split(GEMMA_QUOTE)
    spelt = "".join(json.dumps(part) if i % 2 else GEMMA_KEY.sub(r'\1"\2":', part) for i, part in enumerate(parts))
    return checked({"name": head[1], "arguments": read_object(spelt)}, tools), closed


INVOKE = re.compile(r'\s*<atem:invoke name="([^"]+)">')
ATEM = re.compile(
    r'\s*<atem:parameter name="([^"]+)"[^>]*>(.*?)</atem:parameter>(?=\s*(?:<atem:parameter|</atem:invoke>))', re.DOTALL
)
INVOKE_END = re.compile(r"\s*</atem:invoke>")


def _atem(text: str, at: int, tools: Schemas) -> tuple[ToolCall, int]:
    """``<atem:invoke name="f"> <atem:parameter name="x">1</atem:parameter> </atem:invoke>``."""
    head = INVOKE.match(text, at)
    if head is None:
        raise MalformedError
    at, texts = head.end(), {}
    while (parameter := ATEM.match(text, at)) is not None:
        texts[parameter[1]] = parameter[2]
        at = parameter.end()
    closing = INVOKE_END.match(text, at)
    if closing is None:
        raise MalformedError
    return typed(head[1], texts, tools), closing.end()


# -- forms of their own -----------------------------------------------------------------------------------------------

LLAMA_HEAD = r'<\|python_tag\|>|\{\s*"(?:name"\s*:|type"\s*:\s*"function"\s*,\s*"(?:name|function)"\s*:)'
LLAMA = re.compile(LLAMA_HEAD)


def _llama(text: str, tools: Schemas) -> Iterator[Found]:
    """``{"name": "f", "parameters": {...}}`` with nothing around it; an object without parameters is an answer."""
    at = 0
    while (opened := LLAMA.search(text, at)) is not None:
        tagged = opened[0].startswith("<")
        try:
            value, at = read_json(text, opened.end() if tagged else opened.start())
        except MalformedError as error:
            yield Found(opened.start(), len(text), Malformed(str(error)))
            return
        except ValueError:
            yield Found(opened.start(), len(text), Malformed())
            return
        inner = value.get("function") if isinstance(value, dict) else None
        if tagged or any(key in (inner if isinstance(inner, dict) else value) for key in ARGUMENTS):
            yield Found(opened.start(), at, read(partial(checked, value, tools)))


MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?")


def _mistral(text: str, tools: Schemas) -> Iterator[Found]:
    """``[TOOL_CALLS] [{"name": "f", "arguments": {...}}]``, or ``[TOOL_CALLS]f[ARGS]{...}`` for each call."""
    at, mark = 0, "[TOOL_CALLS]"
    while (begun := text.find(mark, at)) >= 0:
        inside = begun + len(mark)
        head = MISTRAL_HEAD.match(text, inside)
        try:
            value, at = read_json(text, head.end() if head else inside)
        except ValueError as error:
            again = text.find(mark, inside)
            at = again if again >= 0 else len(text)
            yield Found(begun, at, Malformed(str(error) if isinstance(error, MalformedError) else ""))
            continue
        if head:
            listed: Any = [{"name": head[1], "arguments": value, "id": head[2]}]
        else:
            listed = value if isinstance(value, list) and value else [value]
        for one in listed:
            yield Found(begun, at, read(partial(checked, one, tools)))


def _harmony(text: str, tools: Schemas) -> Iterator[Found]:
    """``to=functions.f <|constrain|>json<|message|>{...}``, the recipient before or after the channel."""
    for message in harmony_messages(text):
        if message.recipient is not None:
            spelt = text[message.body : message.end]

            def one(name: str = message.recipient, spelt: str = spelt) -> ToolCall:
                return checked({"name": name, "arguments": read_object(spelt)}, tools)

            yield Found(message.begin, message.end, read(one))


def _pythonic(text: str, tools: Schemas) -> Iterator[Found]:
    """``<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>``: a list of Python calls, literals as arguments."""
    begin, end, at = "<|tool_call_start|>", "<|tool_call_end|>", 0
    while (begun := text.find(begin, at)) >= 0:
        closed = text.find(end, begun)
        inside, at = text[begun + len(begin) : closed if closed >= 0 else None], closed + len(end)
        at = len(text) if closed < 0 else at
        listed = _python(inside) or _python(inside.strip().replace("\n", "\\n"))  # some write line ends into texts
        if closed < 0 or not isinstance(listed, ast.List) or not listed.elts:
            yield Found(begun, at, Malformed())
            continue
        for node in listed.elts:
            yield Found(begun, at, read(partial(_python_call, node, tools)))


def _python(text: str) -> Any:
    """Return the syntax tree of an expression; None where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _python_call(node: Any, tools: Schemas) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise MalformedError
    arguments = {str(word.arg): _literal(word.value) for word in node.keywords}
    arguments = read_object(json.dumps(arguments))  # other values of Python are no arguments
    return checked({"name": ast.unparse(node.func), "arguments": arguments}, tools)


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, JSON's names for true, false and null included."""
    names = {"true": True, "false": False, "null": None}
    for inner in ast.walk(node):
        for field, value in ast.iter_fields(inner):
            if isinstance(value, ast.Name) and value.id in names:
                setattr(inner, field, ast.Constant(names[value.id]))
            elif isinstance(value, list):
                value[:] = [
                    ast.Constant(names[v.id]) if isinstance(v, ast.Name) and v.id in names else v for v in value
                ]
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    return ast.literal_eval(node)


# -- all of them ------------------------------------------------------------------------------------------------------


def _deepseek_calls(text: str, tools: Schemas) -> Iterator[Found]:
    """Find calls, the first and the last with the marks around all of them."""
    for located in enclosed(text, tools, *DEEPSEEKS, _deepseek):
        before = text[: located.begin].rstrip()
        after = re.compile(r"\s*" + AROUND[1]).match(text, located.end)
        begin = len(before) - len(AROUND[0]) if before.endswith(AROUND[0]) else located.begin
        yield replace(located, begin=begin, end=located.end if after is None else after.end())


def _between(begin: str, end: str, read: Callable[[str, int, Schemas], tuple[ToolCall, int]]) -> Any:
    return lambda text, tools: enclosed(text, tools, begin, end, read)


TAGGED = ("<tool_call>", "</tool_call>")
FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat("qwen_xml", r"<tool_call>\s*<function=", _between(*TAGGED, _qwen_xml), "<function=", TAGGED),
        ToolFormat("glm_xml", r"<tool_call>\s*[^\s<]", _between(*TAGGED, _glm_xml), "<arg_key>", TAGGED),
        ToolFormat(
            "deepseek",
            r"<｜tool▁calls?▁begin｜>",
            _deepseek_calls,
            "<｜tool▁call▁begin｜>",
            (*DEEPSEEKS, *AROUND, "<｜tool▁sep｜>"),
        ),
        ToolFormat(
            "gemma",
            r"<\|tool_call>\s*call:",
            _between("<|tool_call>", "<tool_call|>", _gemma),
            r"<\|tool_call>",
            ("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
        ),
        ToolFormat(
            "atem",
            r"<atem:function_calls>\s*<atem:invoke name=",
            _between("<atem:function_calls>", "</atem:function_calls>", _atem),
            "<atem:function_calls>",
            ("<atem:function_calls>", "</atem:function_calls>"),
        ),
        ToolFormat(
            "harmony",
            r"<\|(?:start|channel|constrain|message)\|>",
            _harmony,
            r"<\|channel\|>.*commentary",
            (),  # `HARMONY`, which not only calls have
        ),
        ToolFormat(
            "mistral",
            r"\[TOOL_CALLS\]\s*[\[{\w.-]",
            _mistral,
            r"\[TOOL_CALLS\]",
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
        ),
        ToolFormat(
            "pythonic",
            r"<\|tool_call_start\|>\s*\[",
            _pythonic,
            r"<\|tool_call_start\|>",
            ("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        ToolFormat("hermes", r"<tool_call>\s*\{", _between(*TAGGED, _hermes), "<tool_call>", TAGGED),
        ToolFormat("llama", LLAMA_HEAD, _llama, r'\{"name": function name, "parameters"', ("<|python_tag|>",)),
    )
}
"""The forms by name; the first whose parser reads what a template writes is the template's."""
