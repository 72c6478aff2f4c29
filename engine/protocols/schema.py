"""The bodies of requests, with OpenAI's names. An unknown field is refused: nothing is silently ignored.

Types are strict, as in JSON; ``null`` means a field's default. Clients of vLLM and of OpenAI also send options that
this server does not have, with values that change nothing: `only` accepts these values and no others.

The types of the clients (`openai.types`, dictionaries without bounds) are no substitute: they pass on unknown fields,
``n: 0``, custom tools and options that ask for something, and have 34 of the 80 fields of a chat.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..rollout import SamplingParams

Text = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Count = Annotated[int, Field(ge=1, le=1024)]
Length = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def only(*values: Any) -> BeforeValidator:
    """Return the validator of an option that this server does not have: it accepts null and ``values``, none of which
    changes an answer, and refuses any other value."""
    shown = " or ".join(json.dumps(v) for v in values) or "null"

    def check(value: Any) -> Any:
        same = [v for v in values if v == value and isinstance(v, bool) == isinstance(value, bool)]
        if value is None or same:
            return value
        what = "This server does not have it; leave it out or give {shown}"
        raise PydanticCustomError("unsupported", what, {"shown": shown})

    return BeforeValidator(check)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Telemetry(Strict):
    """Fields by which clients tell who asks and what their provider is to keep. None can change an answer, so all are
    accepted without effect; a field that asks for something is refused where the server does not have it."""

    user: Text | None = None
    safety_identifier: Text | None = None
    metadata: dict[str, Any] | None = None
    client_metadata: Any = None
    session_id: Any = None
    trace: Any = None
    trace_id: Any = None
    user_profile_id: Any = None
    prompt_cache_key: Text | None = None  # equal prefixes are found without it
    prompt_cache_retention: Text | None = None
    prompt_cache_options: Any = None


def functions_only(*kinds: str) -> BeforeValidator:
    """Return the validator of a tool: one of another type than ``kinds`` is refused by its type."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in kinds:
            return value
        what = "a tool whose input is no JSON" if kind == "custom" else "a tool of a provider"
        said = "is of type '{kind}', {what}; this server calls functions only: leave it out"
        raise PydanticCustomError("not_a_function", said, {"kind": kind[:100], "what": what})

    return BeforeValidator(check)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[Any, only(False)] = None
    include_obfuscation: Annotated[Any, only(False)] = None


class JsonSchema(Strict):
    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None  # answers always follow the schema


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Telemetry):
    """The fields of both endpoints. ``top_k``, ``min_p``, ``ignore_eos``, ``stop_token_ids``, ``allowed_token_ids``,
    ``return_token_ids`` and ``return_tokens_as_token_ids`` are extensions with vLLM's names; as there, a ``top_k`` of 0
    or -1 means no limit."""

    model: Text | None = None
    n: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # options of OpenAI and vLLM that this server does not have
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    length_penalty: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    early_stopping: Annotated[Any, only(False)] = None
    min_tokens: Annotated[Any, only(0)] = None
    bad_words: Annotated[Any, only([])] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True, False)] = (
        None  # without special tokens there is nothing between them
    )
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    priority: Annotated[Any, only(0)] = None
    cache_salt: Annotated[Any, only()] = None
    logits_processors: Annotated[Any, only([])] = None
    structured_outputs: Annotated[Any, only()] = None
    guided_json: Annotated[Any, only()] = None
    guided_regex: Annotated[Any, only()] = None
    guided_choice: Annotated[Any, only()] = None
    guided_grammar: Annotated[Any, only()] = None
    kv_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only({})] = None
    detokenize: Annotated[Any, only(True)] = None
    thinking_token_budget: Annotated[Any, only()] = None
    request_id: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None

    def sampling_params(self, *, n: int, most: int, top_logprobs: int, seed: int, grammar: Any) -> SamplingParams:
        """Return the engine's sampling parameters.

        Args:
            n: responses to the prompt.
            most: longest response, in tokens.
            top_logprobs: likeliest tokens to record at each position.
            seed: seed to use if the body has none.
            grammar: `SamplingParams.prefix_allowed_tokens_fn`, or None.

        Raises:
            ValueError: a value is out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            n=n,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=None if self.top_k in (0, -1) else self.top_k,
            min_p=self.min_p,
            max_new_tokens=most,
            stop=tuple(stop),
            stop_token_ids=self.stop_token_ids or (),
            allowed_token_ids=self.allowed_token_ids,
            logit_bias=self.logit_bias or {},
            prefix_allowed_tokens_fn=grammar,
            ignore_eos=bool(self.ignore_eos),
            top_logprobs=top_logprobs,
            seed=seed if self.seed is None else self.seed,
        )


class CompletionBody(Sampling):
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: Annotated[Any, only("")] = None
    add_special_tokens: Annotated[Any, only(True)] = None


class ToolFunction(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    return_: Annotated[dict[str, Any] | None, Field(alias="return")] = (
        None  # in Transformers' descriptions of functions
    )
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class ToolName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: ToolName


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    type: Text
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # chat templates read tool calls and names
    role: Text
    content: str | list[Part] | None = None

    def text(self, where: str) -> str:
        """Return the content as chat templates take it: text parts joined by line breaks.

        Raises:
            ValueError: there is no content, or a part of it is not text.
        """
        if isinstance(self.content, str):
            return self.content
        if not self.content:
            if self.role == "assistant":
                return ""
            raise ValueError(f"`{where}.content` is missing; only a message of the assistant may omit it.")
        for i, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise ValueError(f"`{where}.content.{i}` is of type '{part.type}'; this model reads text parts only.")
        return "\n".join(part.text or "" for part in self.content)


class ChatBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Annotated[Tool, functions_only("function")]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # False: only the first call counts, others stay text
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[Name, str | int | float | bool | None] | None = None
    reasoning_effort: Text | None = None  # a variable of the chat template, as is the next
    verbosity: Text | None = None
    best_of: Count | None = None

    # options of OpenAI and vLLM that this server does not have
    echo: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    documents: Annotated[Any, only([])] = None
    chat_template: Annotated[Any, only()] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    include_reasoning: Annotated[Any, only(True)] = None
    modalities: Annotated[Any, only(["text"])] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none")] = None
