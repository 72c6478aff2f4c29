"""The text of sampled tokens as readers get it: without special tokens, but with those that mark reasoning and calls.

Many tokenizers have these marks as special tokens (Mistral's ``[TOOL_CALLS]``, gpt-oss' ``<|channel|>``), and a text
without them no longer says where the thinking ends and what is a call.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

from .reasoning import HARMONY, TAGS
from .tool_formats import FORMATS

if TYPE_CHECKING:  # parts that need no tokenizer import this file
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Where a mark begins and ends in a text."""


class Marks:
    """The special tokens of a tokenizer that mark reasoning and calls of tools.

    Attributes:
        kept: their texts by id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
        names = {mark for pair in TAGS for mark in pair} | {mark for form in FORMATS.values() for mark in form.tokens}
        there = set(special.values())
        names = names | {"<|channel>"} if "<channel|>" in there else names
        names = names | set(HARMONY) if {"<|channel|>", "<|message|>"} <= there else names
        self.kept = {id_: text for id_, text in special.items() if text in names and id_ not in ends}
        self.harmony = {"<|channel|>", "<|message|>"} <= set(self.kept.values())
        self._dropped = {id_: text for id_, text in special.items() if id_ not in self.kept}

    def without_others(self, ids: Sequence[int]) -> list[int]:
        """Return the ids without special tokens that are no marks."""
        return [i for i in map(int, ids) if i not in self._dropped]

    def dropped_in(self, ids: Sequence[int], *, marks: bool = False) -> list[str]:
        """Return the texts of special tokens among ``ids`` that are no marks, or of all with ``marks``."""
        there = set(ids)
        return [text for id_, text in (self._dropped | (self.kept if marks else {})).items() if id_ in there]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with the marks and without other special tokens."""
        if not self.kept or self.kept.keys().isdisjoint(map(int, ids)):
            return plain_text(self._tokenizer, ids)
        return self._decode(self.without_others(ids))

    def spans(self, ids: Sequence[int], text: str) -> list[Span]:
        """Return where the marks among ``ids`` are in their text `text`; what only spells a mark is none."""
        left = self.without_others(ids)
        places = [place for place, id_ in enumerate(left) if id_ in self.kept]
        spelt = {self.kept[left[place]] for place in places}
        counts = {mark: sum(self.kept[left[place]] == mark for place in places) for mark in spelt}
        certain = all(text.count(mark) == count for mark, count in counts.items())
        found, at = [], 0
        for place in places:
            mark = self.kept[left[place]]
            begin = text.find(mark, at if certain else max(at, len(self._decode(left[:place]))))
            if begin < 0:  # the decoder writes it otherwise
                continue
            at = begin + len(mark)
            found.append((begin, at))
        return found

    def _decode(self, ids: list[int]) -> str:
        return cast("str", cast("Any", self._tokenizer).decode(ids, skip_special_tokens=False))


def marks_of(tokenizer: PreTrainedTokenizerBase) -> Marks:
    """Return the tokenizer's `Marks`, made once and again where tokens were added since."""
    return _made(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _made(tokenizer: PreTrainedTokenizerBase, size: int) -> Marks:
    return Marks(tokenizer)


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of a response as verifiers, judges and programs read it."""
    return marks_of(tokenizer).text(ids)


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of ``ids`` without any special tokens."""
    return cast("str", cast("Any", tokenizer).decode(ids, skip_special_tokens=True))


def without(text: str, spans: Collection[Span]) -> str:
    """Return ``text`` without the parts at ``spans``, which are in order and apart."""
    parts, at = [], 0
    for begin, end in spans:
        parts.append(text[at:begin])
        at = end
    return "".join([*parts, text[at:]])
