"""A model's answer: its tokens, read as a text and calls of tools, in no protocol's form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus
from ..programs.chat.tool_calls import read_turn
from ..rollout import Completion
from .detokenize import Detokenizer
from .prompts import Offered
from .streamed import Streamed


class Called(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


class Answer(NamedTuple):
    """An answer to a chat."""

    text: str
    calls: list[Called]
    reason: str
    """``stop``, ``length``, ``tool_calls`` or ``error``."""
    stop: str | None = None
    """The stop text that ended it."""


REASONS = {LeafStatus.STOP: "stop", LeafStatus.LENGTH: "length"}
NewId = Callable[[str | None, int], str]
"""Gives a call its id, from the one that the model wrote, if it did, and the call's place in the answer."""


def random_id(own: str | None, place: int) -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class Reader:
    """Reads the answers to one request.

    Args:
        stop: texts that end an answer and are cut from it.
        tool: function that the answer must call, "" if the answer names it; None if the answer is a text.
        tools: tools whose calls are searched for in that text.
        most_calls: largest number of such calls; None: any number.
        new_id: gives calls their ids.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        *,
        tool: str | None = None,
        tools: Offered | None = None,
        most_calls: int | None = None,
        new_id: NewId = random_id,
    ) -> None:
        self.tokenizer, self.tool = tokenizer, tool
        self._stop, self._tools, self._most_calls, self._new_id = stop, tools, most_calls, new_id
        self._last: tuple[Completion, Answer] | None = None

    def decode(self, ids: Sequence[int]) -> str:
        return cast("str", self.tokenizer.decode(ids, skip_special_tokens=True))

    def text(self, completion: Completion) -> str:
        """Return the answer's text, without the stop text that ended it, as the protocols require."""
        return self._cut(self.decode(completion.token_ids.tolist()))[0]

    def read(self, completion: Completion) -> Answer:
        """Return what an answer says and calls; calls keep their ids where the same answer is read again."""
        if self._last is not None and self._last[0] is completion:
            return self._last[1]
        text, stop = self._cut(self.decode(completion.token_ids.tolist()))
        content, calls = self._calls(text, completion.status)
        reason = REASONS.get(completion.status, "error")
        reason = "tool_calls" if calls and completion.status is LeafStatus.STOP else reason
        answer = Answer(content, calls, reason, stop if completion.status is LeafStatus.STOP else None)
        self._last = completion, answer
        return answer

    def streamed(self) -> Streamed:
        """Return the state of a stream of one choice, which has sent nothing."""
        return Streamed(Detokenizer(self.tokenizer), self._stop, self._tools.form if self._tools else None)

    def rest(self, choice: Streamed, answer: Answer) -> str | None:
        """Return the text of an answer that a stream has not sent; None where what it sent is not in the answer."""
        return answer.text[len(choice.sent) :] if answer.text.startswith(choice.sent) else None

    def _calls(self, text: str, status: LeafStatus) -> tuple[str, list[Called]]:
        found: list[tuple[str | None, str, Any]]
        if self.tool is None:
            if self._tools is None:
                return text, []
            turn = read_turn(text, self._tools.schemas, self._tools.form, self._most_calls)
            text, found = turn.content, [(call.id, call.name, json.dumps(call.arguments)) for call in turn.calls]
        elif status is not LeafStatus.STOP:
            return text, []
        elif self.tool:
            text, found = "", [(None, self.tool, text)]
        else:  # one of several: the answer names it
            call = json.loads(text)
            text, found = "", [(None, call["name"], json.dumps(call["arguments"]))]
        return text, [Called(self._new_id(own, place), *call) for place, (own, *call) in enumerate(found)]

    def _cut(self, text: str) -> tuple[str, str | None]:
        ends = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        at, stop = min(ends, default=(len(text), None))
        return text[:at], stop


def usage(prompts: Sequence[Sequence[int]], written: int) -> dict[str, int]:
    """Return the numbers of tokens read and written, with OpenAI's names."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
