"""Bodies of requests, as OpenAI names them. A field that is not here is refused: nothing is silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...rollout import SamplingParams


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Sampling(BaseModel):
    """What both endpoints share. ``top_k``, ``min_p``, ``ignore_eos``, ``stop_token_ids``, ``allowed_token_ids`` and
    ``return_token_ids`` are extensions, spelt as vLLM does."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks; of no consequence here
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None

    def sampling_params(self, most: int, top_logprobs: int, seed: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=most,
            stop=tuple(stop),
            stop_token_ids=self.stop_token_ids,
            allowed_token_ids=self.allowed_token_ids,
            logit_bias=self.logit_bias or {},
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
            seed=seed if self.seed is None else self.seed,
        )


class CompletionBody(Sampling):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # templates read tool calls and names
    role: str
    content: Any = None


class ChatBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = {}
