"""Turns bodies into token ids: texts, conversations with the model's template, and the schemas of answers.

All of it may take long, so it runs in threads other than the event loop's.
"""

from __future__ import annotations

import inspect
import json
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from transformers import PreTrainedTokenizerBase

from ..chat.messages import find_format
from ..chat.tool_formats import ToolFormat
from ..chat.writing import complete, plain
from .grammar import JSON_OBJECT
from .schema import ChatBody, CompletionBody, JsonObjectFormat, JsonSchemaFormat, NamedTool, Sampling, TextFormat
from .tool_schemas import arguments_schema, one_of

HINTS = ("reasoning_effort", "verbosity")
"""Fields of a chat that are variables of some chat templates."""
MOST_RESPONSES = 4096  # largest number of responses to one HTTP request


def completion_prompts(tokenizer: PreTrainedTokenizerBase, body: CompletionBody) -> list[list[int]]:
    """Return the token ids of each prompt to complete.

    Raises:
        ValueError: there is none, or too many responses are asked for.
    """
    prompts: Any = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    if not prompts:
        raise ValueError("`prompt` is empty; give a text or token ids.")
    if len(prompts) * max(body.n or 1, body.best_of or 1) > MOST_RESPONSES:
        raise ValueError(f"`prompt` and `n` ask for more than {MOST_RESPONSES} responses; ask for fewer at once.")
    return [tokenizer(text)["input_ids"] if isinstance(text, str) else text for text in prompts]


class Conversation(NamedTuple):
    ids: list[int]
    ignored: list[str]
    """Those of `HINTS` that the body gives and the template does not know."""


def chat_prompt(tokenizer: PreTrainedTokenizerBase, body: ChatBody) -> Conversation:
    """Return the token ids of the conversation, written with the model's chat template.

    Raises:
        ValueError: there is no template, or it cannot write these messages, or not all that they say.
    """
    if tokenizer.chat_template is None:
        raise ValueError("This model has no chat template; use /v1/completions.")
    shown = shown_tools(body)
    options, ignored = template_options(tokenizer, body, shown)
    text = complete(tokenizer, plain_messages(body), shown, options).text
    return Conversation(list(tokenizer(text, add_special_tokens=False)["input_ids"]), ignored)


def plain_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages in the form that all doors share; see `plain`.

    Raises:
        ValueError: a message has no content, or a part that is no text.
    """
    return plain(
        [
            {**message.model_dump(exclude_none=True), "content": message.text(f"messages.{i}")}
            for i, message in enumerate(body.messages)
        ]
    )


def shown_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools that the template is to describe."""
    offered = None if body.tool_choice == "none" else body.tools
    return None if offered is None else [tool.model_dump(exclude_none=True, by_alias=True) for tool in offered]


def template_options(
    tokenizer: PreTrainedTokenizerBase, body: ChatBody, shown: list[dict[str, Any]] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables of the template that a body sets, and those of `HINTS` that the template does not know.

    Raises:
        ValueError: one is no variable of a template, or is given twice.
    """
    options = dict(body.chat_template_kwargs or {})
    # the method's own parameters are refused: they would let a client supply a template
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "self"}
    if refused := next((name for name in options if name in taken), None):
        raise ValueError(f"`chat_template_kwargs.{refused}` is not a variable of the template; leave it out.")
    hints = {name: value for name in HINTS if (value := getattr(body, name)) is not None}
    if twice := next((name for name in hints if name in options), None):
        raise ValueError(f"`{twice}` is in `chat_template_kwargs` too; give it once.")
    try:
        variables = _variables(tokenizer.get_chat_template(tools=shown)) if hints else frozenset()
    except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"The model's chat template cannot be read: {' '.join(str(error).split())}") from error
    options |= {name: value for name, value in hints.items() if name in variables}
    return options, [name for name in hints if name not in variables]


class _Generation(jinja2.ext.Extension):
    """The tag of Transformers that marks what a model writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(16)
def _variables(template: str) -> frozenset[str]:
    """Return the names that a template reads."""
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(template)
    return frozenset(name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "load")


def forced_tool(body: ChatBody) -> str | None:
    """Return the name of the tool that the answer must call, "" for any of several, None if none has to be called.

    Raises:
        ValueError: there is no such tool, or the answer is to have another format too.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    names = [tool.function.name for tool in body.tools or []]
    if not names:
        raise ValueError("`tool_choice` requires a tool call but `tools` has none; add the tools, or leave it out.")
    if isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat):
        raise ValueError("`tool_choice` and `response_format` cannot both determine the answer; choose one.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"`tool_choice` names '{choice.function.name}'; `tools` has {', '.join(names)}.")
    if isinstance(choice, NamedTool):
        return choice.function.name
    return names[0] if len(names) == 1 else ""


class Offered(NamedTuple):
    """The tools that an answer may call, and the format in which the model writes calls."""

    schemas: dict[str, Any]
    """JSON schema of each tool's parameters, by the tool's name."""
    form: ToolFormat


def offered_tools(tokenizer: PreTrainedTokenizerBase, body: ChatBody) -> Offered | None:
    """Return the tools of a request; None if it has none, or the model's template writes calls in an unknown format."""
    if not body.tools or body.tool_choice not in (None, "auto"):
        return None
    try:
        form = find_format(tokenizer, shown_tools(body) or [])
    except ValueError:
        return None
    return Offered({tool.function.name: tool.function.parameters or {} for tool in body.tools}, form)


def answer_schema(body: Sampling) -> str | None:
    """Return the JSON schema that the answer must follow; None for any text.

    Raises:
        ValueError: the parameters of a tool that has to be called are no object.
    """
    if isinstance(body, ChatBody) and (tool := forced_tool(body)) is not None:
        tools = [(t.function.name, t.function.parameters) for t in body.tools or []]
        if not tool:
            return json.dumps(one_of(tools))
        return json.dumps(next(arguments_schema(*function) for function in tools if function[0] == tool))
    match body.response_format:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return json.dumps(JSON_OBJECT)
        case JsonSchemaFormat(json_schema=named):
            return json.dumps(named.schema_)
