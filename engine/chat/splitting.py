"""Splits the text of a turn, part by part, into its reasoning and what it says; a whole turn is one part.

Reasoning is separated where its marks are special tokens, which no client sees. Between ordinary marks
(``<think>`` of Qwen) it stays in what is said, as the model wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .marks import Span
from .reasoning import HARMONY, HEADER, RECIPIENT, TAGS

OPENINGS = {"<|channel>" if begin == "<|channel>thought" else begin for begin, _ in TAGS}  # the name is ordinary text
CLOSINGS = {end for _, end in TAGS}
_HARMONY = re.compile("|".join(map(re.escape, (*HARMONY, "<|call|>", "<|return|>"))))
_RECIPIENT_BEGUN = re.compile(r"\s*(?:t|to|to=[^\s<]*(?:\s+\w*)?)?$")
"""Matches a text that may turn out to be the recipient before a header."""
_LONGEST = max(map(len, HARMONY))


class Part(NamedTuple):
    """A part of a turn."""

    text: str
    reasons: bool = False
    """It is reasoning."""
    mark: bool = False
    """It is a mark of a call: calls are read with it, and it is not told."""


class TagSplitter:
    """Splits at pairs of marks that are special tokens; ``thinks`` is True while the text is reasoning."""

    def __init__(self, thinks: bool = False) -> None:
        self.thinks = thinks
        self._named = True  # False in the name of a channel, up to the end of its line

    def add(self, text: str, spans: Sequence[Span], last: bool = False) -> Iterator[Part]:
        """Yield the parts of the next text, whose marks are at ``spans``."""
        at = 0
        for begin, end in spans:
            yield from self._text(text[at:begin])
            mark, at = text[begin:end], end
            if mark in OPENINGS or mark in CLOSINGS:
                self.thinks, self._named = mark in OPENINGS, mark != "<|channel>"
            elif not self.thinks:
                yield Part(mark, mark=True)
        yield from self._text(text[at:])

    def _text(self, text: str) -> Iterator[Part]:
        if not self._named:
            _, line_end, text = text.partition("\n")
            self._named = bool(line_end)
        if text:
            yield Part(text, self.thinks)


class HarmonySplitter:
    """Splits at the messages of gpt-oss: those in the channel ``analysis`` are reasoning, and each other one that calls
    nothing begins a line of what is said. A message that calls a function stays whole, for its parser."""

    def __init__(self) -> None:
        self.thinks = False
        self._left = ""  # what may be the beginning of a mark, or of a recipient before a header
        self._header: str | None = None  # the header that has begun
        self._reasons, self._open = False, False  # the message that is open
        self._begun = {True: False, False: False}  # there is reasoning, there is something said

    def add(self, text: str, spans: Sequence[Span], last: bool = False) -> Iterator[Part]:
        """Yield the parts of the next text; marks are found in it. With ``last`` nothing is held back any more."""
        text, self._left = self._left + text, ""
        at = 0
        for match in _HARMONY.finditer(text):
            yield from self._text(text[at : match.start()], before=match[0])
            yield from self._mark(match[0])
            at = match.end()
        rest = text[at:]
        if not last:
            held = _beginning(rest)
            if self._header is None and not self._open and _RECIPIENT_BEGUN.match(rest[:held]):
                held = 0
            rest, self._left = rest[:held], rest[held:]
        yield from self._text(rest)

    def _text(self, text: str, before: str = "") -> Iterator[Part]:
        """Yield a text without marks, which the mark ``before`` follows."""
        if self._header is not None:
            self._header += text
        elif not self._open and before in ("<|channel|>", "<|constrain|>", "<|message|>"):
            cut = re.search(r"\s*to=[^<]*$", text)
            begin = len(text) if cut is None else cut.start()
            self._header = text[begin:]
            yield from self._told(text[:begin])
        else:
            yield from self._told(text)

    def _told(self, text: str) -> Iterator[Part]:
        if text:
            self._begun[self._reasons] = True
            yield Part(text, self._reasons)

    def _mark(self, mark: str) -> Iterator[Part]:
        if mark == "<|message|>":
            header, self._header, self._open = (self._header or "") + mark, None, True
            read = HEADER.search(header)
            channel = ((read and read["channel"]) or "").split(maxsplit=1)
            called = RECIPIENT.search(header)
            if called is not None and called[1] != "assistant":
                self._reasons = False
                for piece in re.split(f"({_HARMONY.pattern})", header):
                    if piece:
                        yield Part(piece, mark=True)
                return
            self._reasons = channel[:1] == ["analysis"]
            if self._begun[self._reasons]:
                yield Part("\n", self._reasons)
        elif mark in ("<|start|>", "<|channel|>", "<|constrain|>"):
            begins = self._header is None
            self._header = mark if begins else f"{self._header}{mark}"
            self._open = self._reasons = False
        else:
            self._header, self._open, self._reasons = None, False, False
            yield Part(mark, mark=True)


def _beginning(text: str) -> int:
    """Return where a mark may begin that the end of ``text`` has begun."""
    begin = text.rfind("<", max(len(text) - _LONGEST, 0))
    if begin >= 0 and any(mark.startswith(text[begin:]) for mark in (*HARMONY, "<|call|>", "<|return|>")):
        return begin
    return len(text)


def splitter(harmony: bool, *, thinks: bool = False) -> TagSplitter | HarmonySplitter:
    """Return what splits a turn.

    Args:
        harmony: the model writes messages as gpt-oss does.
        thinks: the prompt has begun the reasoning.
    """
    return HarmonySplitter() if harmony else TagSplitter(thinks)
