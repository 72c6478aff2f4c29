"""Converts places in the text of tokens to the tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from .columns import Array

Decode = Callable[[Array], str]
"""Returns the text of token ids ``[n]``."""


def token_that_completes(ids: Array, end: int, decode: Decode) -> int:  # [n] int32, n >= 1
    """Return the index of the first token with which the text of ``ids`` has ``end`` characters; the last without."""
    place = bisect_left(range(len(ids)), end, key=lambda token: len(decode(ids[: token + 1])))
    return min(place, len(ids) - 1)


def tokens_between(ids: Array, begin: str, end: str, decode: Decode) -> Iterator[slice]:  # [n] int32
    """Yield the tokens of each part of the text that follows ``begin`` up to the next ``end``, or to the text's end.

    A token belongs to a part if any of its characters does. Tokens that hold only some bytes of a character belong to
    the part that the character does. An empty ``begin`` stands for the beginning of the text, an empty ``end`` for its
    end.
    """
    text, at = decode(ids), 0

    def whole(tokens: Array) -> str:
        return decode(tokens).rstrip("\ufffd")  # which ends it where bytes of a character are missing

    while len(ids) and (place := text.find(begin, at)) >= 0:
        first = place + len(begin)
        last = text.find(end, first) if end else len(text)
        last = len(text) if last < 0 else last
        if first < last:
            start = token_that_completes(ids, first, whole) if first else -1
            shared = start >= 0 and len(decode(ids[: start + 1])) > first
            yield slice(start if shared else start + 1, token_that_completes(ids, last, whole) + 1)
        at = last + len(end)
        if not begin or at >= len(text):
            return
