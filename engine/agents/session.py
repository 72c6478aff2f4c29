"""The exact tokens of an episode's calls: what was sampled keeps its ids, and only what follows is tokenised.

A call names its messages. Where they begin with those of an earlier call and its answer, as the client got it, the
prompt begins with that call's tokens, prompt and sampled, and grows by the rules of `Conversation.grow`. Where an agent
rewrites its history, the longest beginning of which this holds is taken, and the template writes the rest; the fork is
then at the first token that differs.

    call 1   prompt 1 | sampled 1
    call 2   prompt 1 | sampled 1 | appended | sampled 2
    call 3   prompt 1 | sampled 1 | other text, an edited answer among it | sampled 3

A call that continues the last call of a chain belongs to the chain; every other one begins a chain. A chain has a seed
of its own, and the random numbers of its tokens are counted from the end of its first prompt, so that the first chain
of episode i samples what branch i of a group samples whose turns an environment answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat.conversation import Conversation, conversation
from ..chat.marks import response_text
from ..chat.messages import call_id
from ..chat.writing import IncompleteError, complete
from ..protocols.answers import Answer
from ..rollout.records import child_seed

Message = dict[str, Any]
Key = tuple[bytes, bytes]
"""Two digests of a message: of all that it says, and of its content and calls alone, as answers are compared."""


@dataclass(eq=False)
class Chain:
    """A chain of calls.

    Attributes:
        seed: of its samples.
        begin: length of its first prompt, in tokens; None before.
    """

    seed: int
    begin: int | None = None

    def drawn(self, prompt: int) -> int:
        """Return the number of its tokens before an answer to a prompt of ``prompt`` tokens."""
        self.begin = prompt if self.begin is None else self.begin
        return prompt - self.begin


@dataclass(eq=False)
class Turn:
    """A call: its prompt, and once it is answered what later calls may continue.

    Attributes:
        base: the call that it continues.
        added: the tokens of the prompt after those of ``base``.
        chain: the chain that it belongs to.
    """

    base: Turn | None
    added: list[int]
    chain: Chain
    template: tuple[str, str]
    """The tools and the variables of the template, as texts."""
    messages: list[Message]
    keys: list[Key]
    written: list[str]
    """The texts of the messages so far, the argument of `Conversation.grow`."""
    turns: list[int]
    """The places of messages whose tokens were sampled."""
    sampled: list[int] = field(default_factory=list)
    end: int | None = None
    """The token that ended the answer; None if it was cut."""
    also: bytes | None = None
    """The digest of the answer with the stop text that ended it: it is sampled and not told, and agents put it back."""
    next: Turn | None = None
    """The call that continues the chain."""

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt."""
        parts, turn = [self.added], self.base
        while turn is not None:
            parts += [turn.sampled, turn.added]
            turn = turn.base
        return [token for part in reversed(parts) for token in part]


class Session:
    """The calls of an episode; one thread at a time calls it.

    Args:
        tokenizer: with the chat template.
        ends: the model's end-of-sequence tokens.
        prompt: token ids of the group's prompt, which a call that writes the same conversation gets.
        seed: of the episode.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], prompt: Sequence[int], seed: int
    ) -> None:
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self._prompt, self._seed, self._chains = list(prompt), seed, 0
        self._answered: list[Turn] = []
        self._ids = 0
        self._shown: dict[str, str] = {}

    def new_id(self, agent_id: str | None, place: int) -> str:
        """Return the id of a call of a tool: no other call of the episode has it. Templates are shown the one that the
        model wrote, or the place of the call in its turn, so that equal turns are written alike in every episode."""
        issued = call_id(self._ids)
        self._ids += 1
        self._shown[issued] = agent_id or call_id(place)
        return issued

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Return the turn that answers ``messages``.

        Args:
            messages: as `plain_messages` gives them.
            tools: the tools' descriptions for the template.
            options: further variables of the template.

        Raises:
            ValueError: the template cannot write the messages, or not all that they say.
        """
        talk = conversation(self.tokenizer, tools, self.ends, options)
        template = json.dumps(talk.tools), json.dumps(talk.options)
        keys, as_shown = [_key(message) for message in messages], [self._as_shown(message) for message in messages]
        for base in self._bases(template, keys):
            length = len(base.messages)
            try:
                shown = self._written(talk, as_shown, length)
                ids, written = talk.grow(shown[:length], base.written, shown[length:], base.end, base.turns)
            except ValueError:  # the template writes what was before in another way: an earlier answer may do
                continue
            chain = base.chain if base.next is None else self._new_chain()
            talked = [*base.messages, *shown[length:]]
            turn = Turn(base, ids, chain, template, talked, keys, written, list(base.turns))
            if base.next is None:
                base.next = turn
            return turn
        shown = complete(self.tokenizer, as_shown, talk.tools, talk.options).messages
        ids = talk.ids(shown)
        ids = self._prompt if ids != self._prompt and self._is_prompt(talk, shown) else ids
        return Turn(None, ids, self._new_chain(), template, shown, keys, talk.begin(shown), [])

    def answered(self, turn: Turn, sampled: Sequence[int], answer: Answer) -> None:
        """Record what was sampled for a turn, and what its client gets."""
        function = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in answer.calls]
        calls = [
            {"id": call.id, "type": "function", "function": function_call}
            for call, function_call in zip(answer.calls, function, strict=True)
        ]
        message: Message = {"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {})
        turn.sampled = list(sampled)
        whole = response_text(self.tokenizer, turn.sampled)
        if answer.stop is not None and whole == answer.text + answer.stop:
            turn.also = _key({**message, "content": whole})[1]
        turn.end = turn.sampled[-1] if turn.sampled and turn.sampled[-1] in self.ends else None
        turn.turns = [*turn.turns, len(turn.messages)]
        turn.messages = [*turn.messages, self._as_shown(message)]
        turn.keys = [*turn.keys, _key(message)]
        self._answered.append(turn)

    def dropped(self, turn: Turn) -> None:
        """Forget a turn that gets no answer; another call may continue what it continued."""
        if turn.base is not None and turn.base.next is turn:
            turn.base.next = None

    def _bases(self, template: tuple[str, str], keys: Sequence[Key]) -> list[Turn]:
        """Return the answered turns that the messages begin with, the longest first; of equal ones, those that no call
        continues, and then the newest."""
        bases = []
        for number, turn in enumerate(self._answered):
            last = len(turn.keys) - 1
            if last >= len(keys) or turn.template != template or keys[last][1] not in (turn.keys[last][1], turn.also):
                continue
            sampled = set(turn.turns)
            if all(turn.keys[i][i in sampled] == keys[i][i in sampled] for i in range(last)):
                bases.append((last, turn.next is None, number))
        return [self._answered[number] for _, _, number in sorted(bases, reverse=True)]

    def _written(self, talk: Conversation, messages: list[Message], since: int) -> list[Message]:
        """Return the messages in the form in which the template writes them whole from the place ``since`` on; what is
        before it has been sampled."""
        try:
            return complete(self.tokenizer, messages, talk.tools, talk.options, since=since).messages
        except IncompleteError:
            raise
        except ValueError:
            return messages  # what was sampled need not be written: `Conversation.grow` checks the rest

    def _is_prompt(self, talk: Conversation, messages: Sequence[Message]) -> bool:
        """Return whether the messages are the group's prompt, in which a text may spell control tokens."""
        return talk.plain_ids(messages) == self._prompt

    def _new_chain(self) -> Chain:
        number, self._chains = self._chains, self._chains + 1
        return Chain(self._seed if number == 0 else int(child_seed(self._seed, number)))

    def _as_shown(self, message: Message) -> Message:
        """Return a message with the ids that templates are shown."""
        message = dict(message)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [
                {**call, "id": self._shown.get(call["id"], call["id"])}
                if isinstance(call, dict) and isinstance(call.get("id"), str)
                else call
                for call in calls
            ]
        if isinstance(shown_id := message.get("tool_call_id"), str):
            message["tool_call_id"] = self._shown.get(shown_id, shown_id)
        return message


def _key(message: Mapping[str, Any]) -> Key:
    """Return digests that are equal where messages are.

    JSON tells 1 from true and from 1.0, and the order of an object's names does not count. Clients send an answer back
    without what a protocol adds to it, so that its content and its calls alone count.
    """
    said: Any = None
    if message.get("role") == "assistant":
        calls = message.get("tool_calls")
        said = [message.get("content") or "", [_called(call) for call in calls] if isinstance(calls, list) else []]
    return _digest(message), _digest(said)


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return [call["id"], function.get("name"), function.get("arguments")] if isinstance(function, dict) else call


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=16).digest()
