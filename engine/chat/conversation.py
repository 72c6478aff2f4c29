"""The growth of a conversation: the tokens that the chat template writes after an assistant's turn.

The template renders the whole conversation: the messages so far, the new ones and the generation prompt. The text after
the assistant's last turn is tokenised; sampled tokens stay as they are. A marker stands for each turn that was sampled,
since the template may write it otherwise in history (without its thinking, or with other white space in its calls). All
other messages must appear in each rendering exactly as they were appended; a template that rewrites them is refused.

    prompt | turn 1 </s> | [user] no [/user] [model] | turn 2 </s> | ...
    given  | sampled     | appended                  | sampled     |
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from .literal import Disguise, literal
from .rendering import Message, render, roles_of

STYLES = [(False, False), (True, False), (False, True), (True, True)]
"""Ways to give a turn with calls to a template: arguments as a JSON text or not, with content or without.

Some templates want arguments as texts, some write content after the tools' answers, some write no calls.
"""


class Conversation:
    """The growth of conversations that one chat template writes.

    Args:
        tokenizer: with the chat template.
        tools: their JSON schemas, as the prompt offered them.
        ends: ids of the tokens that end a turn of the model.
        options: further variables of the template.

    Raises:
        ValueError: the tokenizer is no fast one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] | None,
        ends: Collection[int],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.tools, self.ends = tokenizer, list(tools or []) or None, frozenset(ends)
        self.options = dict(options or {})
        self._literal = literal(tokenizer)
        self._end_texts = {text for end in self.ends if (text := self._literal.text(end))}
        self._complete: set[tuple[tuple[str, bool, bool], ...]] = set()
        self._style: tuple[bool, bool] | None = None
        self._checked: set[tuple[str, ...]] = set()

    def begin(self, messages: Sequence[Message]) -> list[str]:
        """Return the text of a prompt's messages, in the form that `grow` takes.

        Raises:
            ValueError: the template cannot write the messages.
        """
        # without the generation prompt, or the text in its place: the turn may begin otherwise in history
        return [_common(self._render(messages), self._render(messages, generation=False))]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a prompt's messages, in which only the template and the assistant write control tokens.

        Raises:
            ValueError: the template cannot write the messages.
        """
        disguise = self._literal.disguise(self._render(messages))
        return self._literal.ids(None, self._render(_disguised(messages, disguise)), disguise)

    def plain_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a prompt's messages as the data's prompts have them: texts may spell control tokens."""
        return list(self.tokenizer(self._render(messages), add_special_tokens=False)["input_ids"])

    def grow(
        self,
        messages: Sequence[Message],
        written: Sequence[str],
        new: Sequence[Message],
        end: int | None,
        turns: Sequence[int] | None = None,
    ) -> tuple[list[int], list[str]]:
        """Return the tokens to append after an assistant's turn, and ``written`` with their text.

        Args:
            messages: the conversation; the last one is the assistant's turn.
            written: the text of everything but the turns, as `begin` or the last call returned it.
            new: the messages after the turn.
            end: the token that ended the turn; None if it was cut off, so that all of the template's end is appended.
            turns: the places of the turns among ``messages``, where some of the assistant's were given and not sampled;
                None: they are the last ones of the assistant's, and none is among the new messages.

        Raises:
            ValueError: the template cannot write the messages, leaves one out, writes earlier ones otherwise than
                before, or ends the turn with no token that ends the model's turns.
        """
        if turns is None:
            if any(message.get("role") == "assistant" for message in new):
                raise ValueError("An environment cannot speak for the assistant; let it answer in another role.")
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-len(written) :]
        said, marks = self._marked(messages, new, turns)
        mark = marks[-1]
        text = self._render([*said, *new])
        self._check_same(text, marks, written)
        self._check_complete(said, mark, new)
        after = _after(text, mark)
        disguise = self._literal.disguise(text)
        spoken, hidden = _disguised(new, disguise), after
        if spoken != list(new):
            hidden = _after(self._render([*self._marked(messages, spoken, turns)[0], *spoken]), mark)
        if disguise.lift(hidden) != after:
            raise ValueError(
                f"The chat template writes messages of {roles_of(new)} otherwise where their text holds control "
                "tokens; let the environment leave these out."
            )
        skipped = 0 if end is None else self._turn_end(said, mark, hidden, end)
        fixed = _after(_common(text, self._render([*said, *new], generation=False)), mark)
        return self._literal.ids(end, hidden[skipped:], disguise), [*written, fixed]

    def check(self, messages: Sequence[Message], role: str) -> None:
        """Try three turns of the prompt ``messages``, each answered by a message of ``role``.

        Prompts whose messages have the same roles are tried once.

        Raises:
            ValueError: `grow` would refuse them.
        """
        roles = (role, *(str(message["role"]) for message in messages))
        if roles in self._checked:
            return
        name = self.tools[0]["function"]["name"] if self.tools else "tool"
        tool_fields = {"name": name, "tool_call_id": "call00000"} if role == "tool" else {}
        talk, written = list(messages), self.begin(messages)
        end = next(iter(sorted(self.ends)))
        for turn in range(3):
            answer = {"role": role, **tool_fields, "content": f"answer {turn}"}
            talk.append({"role": "assistant", "content": f"turn {turn}"})
            _, written = self.grow(talk, written, [answer], end)
            talk.append(answer)
        self._checked.add(roles)

    def _render(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        return render(self.tokenizer, messages, self.tools, generation=generation, **self.options)

    def _marked(
        self, messages: Sequence[Message], new: Sequence[Message], turns: Sequence[int]
    ) -> tuple[list[Any], list[str]]:
        """Return the messages with a marker for each of those at the places ``turns``, and the markers.

        A turn that messages of the role ``tool`` answer gets as many calls, since templates look for them.
        """
        taken = json.dumps([*messages, *new], ensure_ascii=False, default=str)
        number = next(number for number in count() if f"\ue000{number}." not in taken)
        marks = [f"\ue000{number}.{turn}\ue001" for turn in range(len(turns))]
        following = [[*messages, *new][i + 1 :] for i in turns]
        answers = [list(takewhile(lambda message: message["role"] == "tool", after)) for after in following]

        def marked(style: tuple[bool, bool]) -> list[Any]:
            talk = [dict(message) for message in messages]
            for i, mark, turn_answers in zip(turns, marks, answers, strict=True):
                talk[i] = {"role": "assistant"} | (
                    _calls(turn_answers, mark, *style) if turn_answers else {"content": mark}
                )
            return talk

        if self._style is None and any(answers):
            for style in STYLES:
                with suppress(ValueError):
                    text = self._render([*marked(style), *new])
                    if all(mark in text for mark in marks):
                        self._style = style
                        break
        return marked(self._style or STYLES[0]), marks

    def _check_same(self, text: str, marks: Sequence[str], written: Sequence[str]) -> None:
        begin, before = 0, "the prompt"
        for part, mark in zip(written, marks, strict=True):
            end = text.rfind(mark)
            if end < 0:
                raise ValueError("The chat template leaves out what the assistant says; environments need it there.")
            if not text.startswith(part, begin):
                old, now = part, text[begin : begin + len(part)]
                at = len(_common(old, now))
                raise ValueError(
                    f"The chat template rewrites {before} once the conversation goes on: {old[at : at + 40]!r} becomes "
                    f"{now[at : at + 40]!r}; use a template that only adds, such as TRL's training templates."
                )
            begin, before = end + len(mark), "earlier messages"

    def _check_complete(self, said: Sequence[Message], mark: str, new: Sequence[Message]) -> None:
        """Look for the text of each new message, once for every sequence of kinds; one that only calls has none."""
        calling = [bool(message.get("tool_calls")) for message in new]
        silent = [calls and not message.get("content") for calls, message in zip(calling, new, strict=True)]
        kinds = tuple(zip((str(message["role"]) for message in new), calling, silent, strict=True))
        if kinds in self._complete:
            return
        texts = [f"\ue000answer {i}\ue001" for i in range(len(new))]
        named = [
            message if none else {**message, "content": text}
            for message, text, none in zip(new, texts, silent, strict=True)
        ]
        after = _after(self._render([*said, *named]), mark)
        if not all(text in after for text, none in zip(texts, silent, strict=True) if not none):
            raise ValueError(
                f"The chat template leaves out messages of {roles_of(new)} after an assistant's turn; choose another "
                "template, or an environment that answers in another role."
            )
        self._complete.add(kinds)

    def _turn_end(self, said: Sequence[Message], mark: str, hidden: str, end: int) -> int:
        """Return the length of the beginning of ``hidden`` that belongs to the turn, its end token included.

        The template writes an end token after a turn whatever follows. The one that was sampled stands in its place,
        also if it is another one (``<|endoftext|>`` for ``<|im_end|>``). Where a turn has no end of its own and the
        next message begins with an end token (``<|observation|>``), it is left out if it is the one that was sampled.
        """
        alone = _after(self._render(said), mark)
        common = _common(hidden, alone)
        first = next(self._ends_in(hidden), None)
        if first is not None and common.startswith(hidden[: first[1]]):
            return first[1]
        if first is not None and common.startswith(hidden[: first[0]]):
            same = hidden[slice(*first)] == self._literal.text(end)
            return first[1] if same else first[0]
        last = _after(self._render(said, generation=False), mark)
        other = next(self._ends_in(last), None)
        if other is not None and common.startswith(last[: other[0]]):
            # the last turn of a conversation may end otherwise: <|return|> where it is <|end|> with others after it
            closing = self._literal.controls.match(common, other[0])
            if closing is not None:
                return closing.end()
        ends = ", ".join(sorted(self._end_texts)) or "none"
        raise ValueError(
            f"The chat template ends an assistant's turn with none of the model's end-of-sequence tokens ({ends}); set "
            "eos_token_id in the model's generation_config.json."
        )

    def _ends_in(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the end tokens of ``text`` begin and end."""
        return (match.span() for match in self._literal.controls.finditer(text) if match[0] in self._end_texts)


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None,
    ends: Collection[int],
    options: Mapping[str, Any] | None = None,
) -> Conversation:
    """Return the `Conversation` of these arguments, made once."""
    as_json = json.dumps(tools), json.dumps(options)
    return _made(tokenizer, len(tokenizer), str(tokenizer.chat_template), *as_json, frozenset(ends))


@functools.lru_cache(maxsize=32)
def _made(
    tokenizer: PreTrainedTokenizerBase, size: int, template: str, tools: str, options: str, ends: frozenset[int]
) -> Conversation:
    return Conversation(tokenizer, json.loads(tools), ends, json.loads(options))


def _calls(answers: Sequence[Message], mark: str, as_text: bool, with_content: bool) -> dict[str, Any]:
    """Return the content and the calls of a turn that ``answers`` answer."""
    arguments: Any = {"argument": mark}
    arguments = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    calls = [
        {
            **({"id": answer["tool_call_id"]} if "tool_call_id" in answer else {}),
            "type": "function",
            "function": {"name": answer.get("name") or "tool", "arguments": arguments},
        }
        for answer in answers
    ]
    return {"content": mark if with_content else "", "tool_calls": calls}


def _disguised(messages: Sequence[Message], disguise: Disguise) -> list[Any]:
    """Return the messages with the texts of all but the assistant in disguise."""
    return [message if message.get("role") == "assistant" else disguise.put(message) for message in messages]


def _after(text: str, mark: str) -> str:
    """Return the text after the last ``mark``."""
    return text[text.rfind(mark) + len(mark) :] if mark in text else ""


def _common(a: str, b: str) -> str:
    """Return the longest text that both begin with."""
    same, other = 0, min(len(a), len(b)) + 1  # a[:same] is common, a[:other] is not
    while other - same > 1:
        middle = (same + other) // 2
        same, other = (middle, other) if b.startswith(a[same:middle], same) else (same, middle)
    return a[:same]
