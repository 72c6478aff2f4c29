"""Turns the tokens of a stream into text as they come, at a cost that does not grow with the text before them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from .marks import Span

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A byte of a character that is no piece of a SentencePiece vocabulary."""
UNFINISHED = "\ufffd"
"""The text that decoders write for bytes that are no character, and for a character whose last bytes are missing."""
MOST_HELD = 64
"""Tokens without a finished character that are decoded together; more are cut into shorter runs where this is exact."""
BEFORE_CLEANED = " 'nvr"
"""All but the last characters of the texts that Transformers' ``clean_up_tokenization`` replaces."""


class Detokenizer:
    """The text of a growing list of tokens, as far as further tokens cannot change it, with the special tokens
    ``shown`` (a group of `Marks`) and without others.

    The texts that `add` returns, one after another, are a prefix of the text of all tokens; the rest of it is
    what the decoder may still write in another way: an unfinished character, and a run of SentencePiece's byte tokens,
    which its decoder reads as characters only if the whole run is valid UTF-8.

    New tokens are decoded after the last token before them, because decoders write a token in the middle of a text in
    another way than at its beginning (SentencePiece drops the first blank, WordPiece sets blanks between words).

    `tokenizers.decoders.DecodeStream` (0.23) is no substitute: it raises "Invalid prefix" at byte tokens after which a
    run is valid or invalid, never writes bytes that are no character, at a cost that grows with the square of their
    number, and takes no tokenizers in Python.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._cleans = _cleans(tokenizer)
        self._shown = shown or {}
        self._silent: dict[int, bool] = {}
        self._before: list[int] = []  # the last of the tokens whose text is final
        self._held: list[int] = []  # tokens after them
        self._written = 0  # characters of the held tokens' text that were returned
        self._uncleaned = ""

    def add(self, tokens: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text that the next tokens make final, and where special tokens are in it."""
        texts: list[str] = []
        spans, length = [], 0
        for token in tokens:
            if token in self._shown:
                self._held.append(token)
                texts.append(self._uncleaned + self._final())  # a mark ends what is before it
                self._uncleaned = ""
                length += len(texts[-1])
                if texts[-1].endswith(mark := self._shown[token]):
                    spans.append((length - len(mark), length))
            elif not self._is_silent(token):
                self._held.append(token)
        texts.append(self._clean(self._final()) if self._cleans else self._final())
        return "".join(texts), spans

    def _final(self) -> str:
        if not self._held or self._in_byte_run():
            return ""
        prefix = self._decode(self._before)
        text = self._decode(self._before + self._held)[len(prefix) :]
        if not text:
            return ""
        if not text.endswith(UNFINISHED):
            self._before = self._held[-1:]
            new, self._held, self._written = text[self._written :], [], 0
            return new
        final = text[:-1]  # at most one character is unfinished: more bytes than that one needs are none
        new, self._written = final[self._written :], len(final)
        if len(self._held) > MOST_HELD:
            self._cut(prefix)
        return new

    def _cut(self, prefix: str) -> None:
        """Forget held tokens whose text is final, at a place where the text is that of the two sides."""
        whole = self._decode(self._before + self._held)
        for place in range(len(self._held) - 1, len(self._held) // 2, -1):
            before = self._decode(self._before + self._held[:place])
            context, rest = self._held[place - 1 : place], self._held[place:]
            after = self._decode(context + rest)[len(self._decode(context)) :]
            if before + after == whole and len(before) - len(prefix) <= self._written:
                self._written -= len(before) - len(prefix)
                self._before, self._held = context, rest
                return

    def _in_byte_run(self) -> bool:
        last = self._tokenizer.convert_ids_to_tokens(self._held[-1])
        return isinstance(last, str) and BYTE_TOKEN.fullmatch(last) is not None

    def _is_silent(self, token: int) -> bool:
        """Return whether decoders skip the token: a lone blank has no text at the beginning, but a second one has."""
        if token not in self._silent:
            self._silent[token] = not self._decode([token, token])
        return self._silent[token]

    def _clean(self, raw: str) -> str:
        """Return the cleaned text up to the last place that no replacement can cross."""
        text = self._uncleaned + raw
        end = len(text.rstrip(BEFORE_CLEANED))
        self._uncleaned = text[end:]
        return cast("str", self._tokenizer.clean_up_tokenization(text[:end]))

    def _decode(self, tokens: list[int]) -> str:
        decode: Any = self._tokenizer.decode
        if self._shown.keys().isdisjoint(tokens):
            return cast("str", decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return cast("str", decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether ``decode`` takes blanks before punctuation away, which Transformers does not do for BPE."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces) and (not is_bpe or bool(forced))
