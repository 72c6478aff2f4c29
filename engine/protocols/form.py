"""OpenAI's completions and chats: choices, chunks of streams, log-probs, usage, errors.

Log-probs, of the chosen token and of the likeliest alternatives, are all under softmax(logits): the model's own
distribution, before temperature, filters, biases and grammars.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..chat.marks import plain_text
from ..chat.streamed import Streamed, Told
from ..rollout import Completion
from ..rollout.records import top_logprobs
from .answers import UNREADABLE, Called, Reader, usage
from .schema import Sampling
from .token_bytes import TokenBytes

Array = npt.NDArray[Any]
LEAST_LOGPROB = -9999.0  # OpenAI's own floor: JSON has no infinity
NAMED = "token_id:"
"""Prefix of a token that is named by its id, as vLLM writes it."""


@dataclass
class Scored:
    """Tokens with their log-probs; the first token of a prompt has None."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[dict[int, float] | None] = field(default_factory=list)

    @classmethod
    def of_records(cls, records: Array) -> Scored:  # [tokens], see RolloutEngine.progress
        logprobs = [max(value, LEAST_LOGPROB) for value in records["raw_logprob"].tolist()]
        return cls(records["token"].tolist(), logprobs, list(top_logprobs(records)))

    @classmethod
    def of_completion(cls, completion: Completion) -> Scored:
        logprobs = [max(value, LEAST_LOGPROB) for value in completion.raw_logprobs.tolist()]
        tops = completion.top or [{} for _ in logprobs]
        return cls(completion.token_ids.tolist(), logprobs, list(tops))

    @classmethod
    def of_prompt(cls, ids: Sequence[int], records: Array) -> Scored:  # [P - 1] records
        return cls([ids[0]], [None], [None]) + cls.of_records(records)

    def __add__(self, other: Scored) -> Scored:
        return Scored(self.tokens + other.tokens, self.logprobs + other.logprobs, self.tops + other.tops)

    def since(self, begin: int) -> Scored:
        return Scored(self.tokens[begin:], self.logprobs[begin:], self.tops[begin:])


class Form(Reader):
    """Formats the answers to one request.

    Args:
        model: name of the model in the answer.
        body: the request.
        chat: the endpoint is the chat's.
        logprobs: the answer has log-probs.
        stop, more: as for `Reader`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        body: Sampling,
        stop: Sequence[str],
        *,
        chat: bool,
        logprobs: bool,
        **more: Any,
    ) -> None:
        super().__init__(tokenizer, stop, turn=chat, **more)
        self.body, self.chat, self.logprobs = body, chat, logprobs
        self._bytes = TokenBytes(tokenizer)
        self._model = model
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def _name(self, token: int) -> str:
        """Return the text by which log-probs name a token, or its id where the request asks for that."""
        return f"{NAMED}{token}" if self.body.return_tokens_as_token_ids else self._bytes.name(token)

    def head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if self.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def whole(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Sequence[Completion]],
        scored: Sequence[Scored | None] = (),
        *,
        n: int = 1,
        echo: bool = False,
    ) -> dict[str, Any]:
        """Format all answers.

        Args:
            choices: those of each prompt, of which the ``n`` likeliest are told.
            scored: the log-probs of each prompt where they are wanted.
            echo: the texts begin with their prompts'.
        """
        answers: list[dict[str, Any]] = []
        for prompt, of_prompt, before in zip(prompts, choices, scored or [None] * len(prompts), strict=True):
            echoed = plain_text(self.tokenizer, prompt) if echo else ""
            answers += [self.choice(len(answers) + i, c, echoed, before) for i, c in enumerate(_best(of_prompt, n))]
        written = sum(len(c.token_ids) for of_prompt in choices for c in of_prompt)
        return {**self.head(""), "choices": answers, "usage": usage(prompts, written)}

    def choice(
        self, index: int, completion: Completion, echoed: str = "", before: Scored | None = None
    ) -> dict[str, Any]:
        """Format one choice; ``echoed`` is the prompt's text if it is wanted, and ``before`` its log-probs."""
        scored, answer = Scored.of_completion(completion), self.read(completion)
        end: dict[str, Any] = {
            "finish_reason": "length" if answer.reason == UNREADABLE else answer.reason,
            "logprobs": None,
        }
        if self.logprobs:
            end["logprobs"] = self.spell(scored if before is None else before + scored, 0)
        if self.body.return_token_ids:
            end["token_ids"] = completion.token_ids.tolist()
        if not self.chat:
            return {"index": index, "text": echoed + answer.text, **end}
        content = answer.text or (None if answer.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = list(map(_call, answer.calls))
        return {"index": index, "message": message, **end}

    # -- streams ----------------------------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events before any text."""
        return ""

    def part(self, index: int, choice: Streamed, told: Told, records: Array) -> str:
        """Return the events for what is new of a choice; ``records`` are those of its tokens so far [tokens]."""
        new = Scored.of_records(records[choice.tokens :]) if self.logprobs else Scored()
        end: dict[str, Any] = {"finish_reason": None, "logprobs": None}
        said = event(self._chunk(index, told, [], new, choice.offset, end, first=choice.tokens == 0))
        choice.tokens, choice.offset = len(records), choice.offset + self._width(new.tokens)
        return said

    def last(self, index: int, choice: Streamed, completion: Completion, prompts: Sequence[Sequence[int]]) -> str:
        """Return the events that end a choice, or an error where its text is not what was sent of it."""
        answer = self.read(completion)
        told = self.rest(choice, answer)
        if told is None:
            return self.failed("The tokenizer changed text that was sent; ask again without `stream`.")
        new = Scored.of_completion(completion).since(choice.tokens)
        end: dict[str, Any] = {
            "finish_reason": "length" if answer.reason == UNREADABLE else answer.reason,
            "logprobs": None,
        }
        if self.body.return_token_ids:
            end["token_ids"] = completion.token_ids.tolist()
        return event(self._chunk(index, told, answer.calls, new, choice.offset, end, first=not choice.begun))

    def failed(self, message: str, status: int = 500, code: str | None = None) -> str:
        """Return the event that tells an error in a stream."""
        return event(error(message, kind_of(status), code))

    def close(self, prompts: Sequence[Sequence[int]], written: int) -> str:
        """Return the events after all choices, of ``written`` tokens."""
        counts, options = "", self.body.stream_options
        if options is not None and options.include_usage:
            counts = event({**self.head(".chunk"), "choices": [], "usage": usage(prompts, written)})
        return f"{counts}data: [DONE]\n\n"

    def _chunk(
        self,
        index: int,
        told: Told,
        calls: Sequence[Called],
        scored: Scored,
        offset: int,
        end: dict[str, Any],
        *,
        first: bool,
    ) -> dict[str, Any]:
        """Format a part of a stream: what is new, and its tokens; ``offset`` is the number of characters before."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if told.reasoning:
            delta["reasoning_content"] = told.reasoning
        if told.text or not (calls or told.reasoning):
            delta["content"] = told.text
        if calls:
            delta["tool_calls"] = [{"index": i, **_call(call)} for i, call in enumerate(calls)]
        if self.logprobs and scored.tokens:
            end["logprobs"] = self.spell(scored, offset)
        body = {"delta": delta} if self.chat else {"text": told.text}
        return {**self.head(".chunk"), "choices": [{"index": index, **body, **end}]}

    # -- log-probs --------------------------------------------------------------------------------------------------

    def _width(self, tokens: Sequence[int]) -> int:
        """Return the number of characters that begin in tokens."""
        return sum(map(self._bytes.width, tokens))

    def spell(self, scored: Scored, offset: int) -> dict[str, Any]:
        """Format log-probs for the endpoint; ``offset`` is the number of characters before the first token."""
        if self.chat:
            rows = zip(scored.tokens, scored.logprobs, scored.tops, strict=True)
            return {
                "content": [
                    {**self._entry(t, lp), "top_logprobs": [self._entry(*other) for other in (top or {}).items()]}
                    for t, lp, top in rows
                ]
            }
        offsets = [offset]
        for token in scored.tokens:
            offsets.append(offsets[-1] + self._bytes.width(token))
        tops: list[dict[str, float] | None] = []
        for top in scored.tops:
            named: dict[str, float] = {}
            for id_, value in (top or {}).items():  # of tokens with the same text the likeliest is first
                named.setdefault(self._name(id_), max(value, LEAST_LOGPROB))
            tops.append(named if top is not None else None)
        return {
            "tokens": list(map(self._name, scored.tokens)),
            "token_logprobs": scored.logprobs,
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets[:-1],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        spelt = self._bytes.of(token)
        return {
            "token": self._name(token),
            "logprob": None if logprob is None else max(logprob, LEAST_LOGPROB),
            "bytes": None if spelt is None else list(spelt),
        }


def _best(choices: Sequence[Completion], n: int) -> Sequence[Completion]:
    """Return the ``n`` choices with the highest mean log-prob of their tokens."""
    if len(choices) <= n:
        return choices
    return sorted(choices, key=lambda c: -float(c.raw_logprobs.mean()))[:n]


def _call(call: Called) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def too_long(prompt: int, requested: int, limit: int) -> str:
    """Return OpenAI's words for a prompt that is too long, alone or with the answer; lengths are in tokens."""
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + requested} tokens "
        f"({prompt} in the messages, {requested} in the completion). "
        "Please reduce the length of the messages or completion."
    )


def kind_of(status: int) -> str:
    """Return OpenAI's type of an error with an HTTP status."""
    return "server_error" if status >= 500 else "invalid_request_error"


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Format an error as OpenAI does."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
