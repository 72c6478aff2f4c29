"""The JSON of answers: choices, chunks of streams, log-probs, usage, errors.

Log-probs, of the chosen token and of the likeliest alternatives, are all under softmax(logits): the model's own
distribution, before temperature, filters, biases and grammars.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ...data.tree import LeafStatus
from ...programs.chat.tool_calls import written
from ...rollout import Completion
from ...rollout.records import top_logprobs
from .detokenize import Detokenizer
from .prompts import Offered
from .schema import Sampling
from .streamed import Streamed

Array = npt.NDArray[Any]
REASONS = {LeafStatus.STOP: "stop", LeafStatus.LENGTH: "length"}
LEAST_LOGPROB = -9999.0  # OpenAI's own floor: JSON has no infinity


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


class Form:
    """Formats the answer to one request.

    Args:
        model: name of the model in the answer.
        body: the request.
        stop: texts that end an answer and are cut from it.
        chat: the endpoint is the chat's.
        logprobs: the answer has log-probs.
        tool: function that the answer must call, "" if the answer names it; None if the answer is a text.
        tools: tools whose calls are searched for in that text.
        most_calls: largest number of such calls; None: any number.
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
        tool: str | None = None,
        tools: Offered | None = None,
        most_calls: int | None = None,
    ) -> None:
        self.body, self.chat, self.logprobs, self.tool = body, chat, logprobs, tool
        self._tools, self._most_calls = tools, most_calls
        self._stop = stop
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._model = model
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if self.chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def text(self, completion: Completion) -> str:
        """Return the answer's text, without the stop text that ended it, as the API requires."""
        return self._cut(self.decode(completion.token_ids.tolist()))

    def streamed(self) -> Streamed:
        """Return the state of a stream of one choice, which has sent nothing."""
        return Streamed(Detokenizer(self._tokenizer), self._stop, self._tools.form if self._tools else None)

    def choice(
        self, index: int, completion: Completion, echoed: str = "", before: Scored | None = None
    ) -> dict[str, Any]:
        """Format one choice; ``echoed`` is the prompt's text if it is wanted, and ``before`` its log-probs."""
        text, scored = self.text(completion), Scored.of_completion(completion)
        content, calls = self._message(text, completion)
        end: dict[str, Any] = {"finish_reason": self._reason(completion, calls), "logprobs": None}
        if self.logprobs:
            end["logprobs"] = self.spell(scored if before is None else before + scored, 0)
        if self.body.return_token_ids:
            end["token_ids"] = completion.token_ids.tolist()
        if not self.chat:
            return {"index": index, "text": echoed + text, **end}
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **end}

    def chunk(self, index: int, text: str, scored: Scored, offset: int, *, first: bool) -> dict[str, Any]:
        """Format a part of a stream: new text and new tokens.

        Args:
            offset: characters of the tokens sent before.
            first: nothing of this choice has been sent.
        """
        return self._chunk(index, text, [], scored, offset, {"finish_reason": None, "logprobs": None}, first=first)

    def last_chunk(self, index: int, choice: Streamed, completion: Completion) -> dict[str, Any]:
        """Format the end of a choice, or an error where its text is not what was sent of it."""
        content, calls = self._message(self.text(completion), completion)
        if not content.startswith(choice.sent):
            return error("The tokenizer changed text that was sent; ask again without `stream`.", "server_error", 500)
        new = Scored.of_completion(completion).since(choice.tokens)
        end: dict[str, Any] = {"finish_reason": self._reason(completion, calls), "logprobs": None}
        if self.body.return_token_ids:
            end["token_ids"] = completion.token_ids.tolist()
        text = content[len(choice.sent) :]
        return self._chunk(index, text, calls, new, choice.offset, end, first=not choice.begun)

    def _chunk(
        self,
        index: int,
        text: str,
        calls: list[dict[str, Any]],
        scored: Scored,
        offset: int,
        end: dict[str, Any],
        *,
        first: bool,
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        if self.logprobs and scored.tokens:
            end["logprobs"] = self.spell(scored, offset)
        body = {"delta": delta} if self.chat else {"text": text}
        return {**self.head(".chunk"), "choices": [{"index": index, **body, **end}]}

    def width(self, tokens: Sequence[int]) -> int:
        """Return the total number of characters of tokens, each decoded on its own."""
        return sum(len(self._name(token)) for token in tokens)

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
        tokens = [self._name(token) for token in scored.tokens]
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        tops: list[dict[str, float] | None] = []
        for top in scored.tops:
            named: dict[str, float] = {}
            for id_, value in (top or {}).items():  # of tokens with the same text the likeliest is first
                named.setdefault(self._name(id_), max(value, LEAST_LOGPROB))
            tops.append(named if top is not None else None)
        return {
            "tokens": tokens,
            "token_logprobs": scored.logprobs,
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets[:-1],
        }

    def decode(self, ids: Sequence[int]) -> str:
        return cast("str", self._tokenizer.decode(ids, skip_special_tokens=True))

    def _name(self, token: int) -> str:
        """Return the token's text inside a text: alone, SentencePiece's decoders drop the blank that it begins with."""
        alone = cast("str", self._tokenizer.decode([token], skip_special_tokens=False))
        if token in self._special:
            return alone
        twice = cast("str", self._tokenizer.decode([token, token], skip_special_tokens=False))
        return twice[len(alone) :] if twice == f"{alone} {alone}" else alone

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._name(token)
        parts = None if "\ufffd" in text else list(text.encode())  # the token is only a part of a character
        return {"token": text, "logprob": None if logprob is None else max(logprob, LEAST_LOGPROB), "bytes": parts}

    def _message(self, text: str, completion: Completion) -> tuple[str, list[dict[str, Any]]]:
        """Split a chat's answer into its content and its tool calls."""
        if self.tool is None:
            if self._tools is None:
                return text, []
            content, calls = written(text, self._tools.schemas, self._most_calls, self._tools.form)
        elif completion.status is not LeafStatus.STOP:
            return text, []
        elif self.tool:
            content, calls = "", [(self.tool, text)]
        else:  # one of several: the answer names it
            call = json.loads(text)
            content, calls = "", [(call["name"], json.dumps(call["arguments"]))]
        return content, [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in calls
        ]

    def _reason(self, completion: Completion, calls: Sequence[Any]) -> str:
        if calls and completion.status is LeafStatus.STOP:
            return "tool_calls"
        return REASONS.get(completion.status, "error")

    def _cut(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def usage(prompts: Sequence[Sequence[int]], written: int) -> dict[str, int]:
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def error(message: str, kind: str, code: int | str) -> dict[str, Any]:
    """Format an error as OpenAI does."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
