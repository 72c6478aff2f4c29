"""A model's answer: its tokens, read as a text and calls of tools, in no protocol's form."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..chat.marks import marks_of, plain_text
from ..chat.reading import Turn, begins_reasoning, read_ids
from ..chat.schemas import read_object
from ..chat.streamed import Streamed, Told
from ..data.segment import LeafStatus
from ..rollout import Completion
from .prompts import Offered


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
    """``stop``, ``length``, ``tool_calls``, ``error`` or `UNREADABLE`."""
    stop: str | None = None
    """The stop text that ended it."""
    reasoning: str = ""
    """Reasoning between marks that are special tokens, which the text does not have."""


UNREADABLE = "unreadable"
"""The reason of a complete call that cannot be read: grammars allow numbers of any size. As half a call is none, chats
and messages tell it as one that was cut; a response has no such reason, and is complete."""
REASONS = {LeafStatus.STOP: "stop", LeafStatus.LENGTH: "length"}
NewId = Callable[[str | None, int], str]
"""Gives a call its id, from the one that the model wrote, if it did, and the call's place in the answer."""


def random_id(call_id: str | None, place: int) -> str:
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
        turn: the answer is a turn of a chat, whose reasoning is not a part of its text.
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
        turn: bool = True,
    ) -> None:
        self.tokenizer, self.tool = tokenizer, tool
        self._stop, self._tools, self._most_calls, self._new_id, self._turn = stop, tools, most_calls, new_id, turn
        self._thinks = False
        self._last: tuple[Completion, Answer] | None = None

    def asked(self, prompt: Sequence[int]) -> None:
        """Take note of the prompt, which may have begun the reasoning."""
        tail: Any = self.tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        self._thinks = begins_reasoning(self.tokenizer, tail)

    def read(self, completion: Completion) -> Answer:
        """Return what an answer says and calls; calls keep their ids where the same answer is read again."""
        if self._last is not None and self._last[0] is completion:
            return self._last[1]
        stop = None if completion.stop is None else completion.stop.text
        turn, called = self._read(completion)
        calls = [
            Called(self._new_id(call_id, place), name, spelt) for place, (call_id, name, spelt) in enumerate(called)
        ]
        reason = REASONS.get(completion.status, "error")
        reason = "tool_calls" if calls and completion.status is LeafStatus.STOP else reason
        if self.tool is not None and not calls and stop is None:
            reason = UNREADABLE if reason == "stop" else reason
        answer = Answer(turn.content, calls, reason, stop, turn.reasoning)
        self._last = completion, answer
        return answer

    def streamed(self) -> Streamed:
        """Return the state of a stream of one choice, which has told nothing."""
        form = self._tools.form if self._tools else None
        return Streamed(self.tokenizer, self._stop, form, turn=self._turn, thinks=self._thinks)

    def rest(self, choice: Streamed, answer: Answer) -> Told | None:
        """Return what a stream has not told of an answer; None where what it told is not in the answer."""
        if not answer.text.startswith(choice.text) or not answer.reasoning.startswith(choice.reasoning):
            return None
        return Told(answer.reasoning[len(choice.reasoning) :], answer.text[len(choice.text) :])

    def _read(self, completion: Completion) -> tuple[Turn, list[tuple[str | None, str, str]]]:
        """Return the turn, and its calls: their own ids, names and arguments, a JSON object each."""
        ids = completion.token_ids.tolist()
        until = self._until(completion)
        if not self._turn or self.tool is not None:
            text = self._text(ids)[:until]
            turn = Turn("", text, [], [])
            if self.tool is None or completion.status is not LeafStatus.STOP:
                return turn, []
            called = _forced(text, self.tool)
            return (turn, []) if called is None else (turn._replace(content=""), [(None, *called)])
        schemas = None if self._tools is None else self._tools.schemas
        form = None if self._tools is None else self._tools.form
        turn = read_ids(self.tokenizer, ids, schemas or {}, form, self._most_calls, thinks=self._thinks, until=until)
        return turn, [(call.id, call.name, json.dumps(call.arguments)) for call in turn.calls]

    def _text(self, ids: Sequence[int]) -> str:
        return marks_of(self.tokenizer).turn(ids) if self._turn else plain_text(self.tokenizer, ids)

    def _until(self, completion: Completion) -> int | None:
        """Return how much of the text comes before the stop text that ended it; None without one."""
        if completion.stop is None:
            return None
        ids = completion.token_ids.tolist()
        text, tail = self._text(ids), completion.stop.tail
        marks = marks_of(self.tokenizer)
        for special in marks.others(ids, marks.special if self._turn else {}):
            tail = tail.replace(special, "")
        if text.endswith(tail):
            return len(text) - len(tail)
        at = text.rfind(completion.stop.text)  # the decoder writes the end of a text otherwise
        return len(text) if at < 0 else at


def _forced(text: str, tool: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that the answer had to be; None where they cannot be read.

    Args:
        tool: its name, "" where the answer names it.
    """
    try:
        value = read_object(text)
        if tool:
            return tool, text
        return (value["name"], json.dumps(value["arguments"])) if isinstance(value["arguments"], dict) else None
    except (ValueError, LookupError):
        return None


def usage(prompts: Sequence[Sequence[int]], written: int) -> dict[str, int]:
    """Return the numbers of tokens read and written, with OpenAI's names."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
