"""Streams of one choice send what further tokens, a stop text or a call cannot take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import regex
from transformers import PreTrainedTokenizerBase

from .detokenize import Detokenizer
from .marks import Span, marks_of, without
from .reading import HARMONY, LLAMA
from .splitting import splitter
from .tool_formats import ToolFormat


class Told(NamedTuple):
    """The new reasoning and text of a stream."""

    reasoning: str
    text: str

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text)


class Streamed:
    """The state of a stream of one choice.

    Args:
        stop: texts that end the answer and are cut from it.
        form: the form of calls, where tools are offered.
        turn: it is a turn of a chat, and no other text.
        thinks: the prompt has begun the reasoning.

    Attributes:
        tokens: number of tokens whose log-probs were sent.
        offset: characters of these tokens, each decoded on its own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        form: ToolFormat | None = None,
        *,
        turn: bool = True,
        thinks: bool = False,
    ) -> None:
        marks = marks_of(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, marks.special if turn else None)
        self._splitter = splitter(turn and (marks.harmony or form is HARMONY), thinks=thinks)
        self._form, self._head = form, None if form is None else regex.compile(form.head)
        self._next = 0  # length at which an object of JSON that is no call may be complete
        self._held = max((len(text) for text in stop), default=0)  # may be the beginning of a stop text
        self._newest: list[int] = []  # the token that may complete one
        self._raw, self._raw_spans = "", list[Span]()  # text that is not split yet
        self._said, self._hidden = "", list[Span]()  # what is said and not told yet
        self._reasoning, self._text = list[str](), list[str]()
        self.seen = 0
        self.tokens = 0
        self.offset = 0

    @property
    def text(self) -> str:
        """All of the text that was told."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """All of the reasoning that was told."""
        return "".join(self._reasoning)

    def add(self, tokens: Sequence[int]) -> Told:
        """Return what to tell after the next tokens."""
        self.seen += len(tokens)
        if self._held:  # a stop text ends with a token, so that all but the newest have completed none
            tokens = [*self._newest, *tokens]
            tokens, self._newest = tokens[:-1], list(tokens[-1:])
        text, spans = self._detokenizer.add(tokens)
        self._raw_spans += [(begin + len(self._raw), end + len(self._raw)) for begin, end in spans]
        self._raw += text
        reasoning, text = self._split(max(len(self._raw) - max(self._held - 1, 0), 0))
        told = Told("" if self._text else reasoning, text)  # reasoning after text is told at the end
        self._reasoning += [told.reasoning] if told.reasoning else []
        self._text += [told.text] if told.text else []
        return told

    @property
    def begun(self) -> bool:
        """True once something was told."""
        return bool(self._reasoning or self._text)

    def opens(self, told: Told) -> tuple[bool, bool]:
        """Return whether ``told``, which `add` has returned last, holds the first reasoning, and the first text."""
        return bool(told.reasoning) and len(self._reasoning) == 1, bool(told.text) and len(self._text) == 1

    def _split(self, end: int) -> tuple[str, str]:
        """Split the raw text up to ``end``, or to the mark that ``end`` would cut."""
        end = next((begin for begin, reached in self._raw_spans if begin < end < reached), end)
        ready = [span for span in self._raw_spans if span[1] <= end]
        reasoning = ""
        for part in self._splitter.add(self._raw[:end], ready):
            if part.reasons:
                reasoning += part.text
                continue
            if part.mark:
                self._hidden.append((len(self._said), len(self._said) + len(part.text)))
            self._said += part.text
        self._raw_spans = [(begin - end, reached - end) for begin, reached in self._raw_spans[len(ready) :]]
        self._raw = self._raw[end:]
        return reasoning, self._certain()

    def _certain(self) -> str:
        """Take what is certain from what is said."""
        end = len(self._said)
        if self._head is not None:
            begun = self._head.search(self._said, partial=True)
            while begun is not None and not begun.partial and self._is_text(begun.start()):
                begun = self._head.search(self._said, begun.end(), partial=True)
            end = end if begun is None else begun.start()
            end = len(self._said[:end].rstrip())
        hidden = [span for span in self._hidden if span[1] <= end]
        text = without(self._said[:end], hidden)
        self._said = self._said[end:]
        self._hidden = [(begin - end, reached - end) for begin, reached in self._hidden[len(hidden) :]]
        return text

    def _is_text(self, begin: int) -> bool:
        """Return True if what begins as a call of Llama's form, an object of JSON, is complete and calls nothing."""
        if self._form is not LLAMA or len(self._said) < self._next:
            return False
        self._next = len(self._said) + len(self._said) // 16  # each look reads all of it
        return next(LLAMA.find(self._said[begin:], {}), None) is None
