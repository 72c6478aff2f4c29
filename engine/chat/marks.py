"""The text of sampled tokens as readers get it: without special tokens, but with those that mark reasoning and calls.

Many tokenizers have these marks as special tokens (Mistral's ``[TOOL_CALLS]``, gpt-oss' ``<|channel|>``), and a text
without them no longer says where the thinking ends and what is a call.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from .reasoning import HARMONY, TAGS
from .tool_formats import FORMATS

if TYPE_CHECKING:  # parts that need no tokenizer import this file
    from transformers import PreTrainedTokenizerBase

Ids = Sequence[int] | npt.NDArray[Any]
"""Token ids [n]."""
Span = tuple[int, int]
"""The places in a text at which a mark begins and ends."""


class Marks:
    """The special tokens of a tokenizer, and those of them that mark reasoning and calls of tools.

    Attributes:
        special: the texts of those that neither begin, end nor pad a text, by id: a turn is read with them.
        kept: the texts of those that are marks, by id: verifiers read responses with them.
        every: the texts of all special tokens, by id.
        harmony: the tokenizer has the marks of gpt-oss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}
        names = {mark for pair in TAGS for mark in pair} | {mark for form in FORMATS.values() for mark in form.tokens}
        there = set(special.values())
        self.harmony = {"<|channel|>", "<|message|>"} <= there
        names |= {"<|channel>"} if "<channel|>" in there else set()
        names |= set(HARMONY) if self.harmony else set()
        self.every = special
        self.special = {id_: text for id_, text in special.items() if id_ not in ends}
        self.kept = {id_: text for id_, text in self.special.items() if text in names}

    def response(self, ids: Ids) -> str:
        """Return the text of ``ids`` with marks and without other special tokens."""
        return self._text(ids, self.kept)

    def turn(self, ids: Ids) -> str:
        """Return the text of ``ids`` with all special tokens that neither begin, end nor pad a text."""
        return self._text(ids, self.special)

    def others(self, ids: Ids, shown: Mapping[int, str]) -> list[str]:
        """Return the texts of the special tokens among ``ids`` that are not among those ``shown``."""
        there = set(ids)
        return [text for id_, text in self.every.items() if id_ in there and id_ not in shown]

    def spans(self, ids: Ids, text: str) -> list[Span]:
        """Return where the special tokens among ``ids`` are in the text of their `turn`; what only spells one is
        none."""
        left = self._without(ids, self.special)
        places = [place for place, id_ in enumerate(left) if id_ in self.special]
        counts = Counter(self.special[left[place]] for place in places)
        certain = all(text.count(mark) == count for mark, count in counts.items())
        spans, at = [], 0
        for place in places:
            mark = self.special[left[place]]
            begin = text.find(mark, at if certain else max(at, len(self._decode(left[:place]))))
            if begin < 0:  # the decoder writes it otherwise
                continue
            at = begin + len(mark)
            spans.append((begin, at))
        return spans

    def _text(self, ids: Ids, shown: Mapping[int, str]) -> str:
        if not shown or shown.keys().isdisjoint(map(int, ids)):
            return plain_text(self._tokenizer, ids)
        return self._decode(self._without(ids, shown))

    def _without(self, ids: Ids, shown: Mapping[int, str]) -> list[int]:
        return [i for i in map(int, ids) if i in shown or i not in self.every]

    def _decode(self, ids: list[int]) -> str:
        return cast("str", cast("Any", self._tokenizer).decode(ids, skip_special_tokens=False))


def marks_of(tokenizer: PreTrainedTokenizerBase) -> Marks:
    """Return the tokenizer's `Marks`, made once and again where tokens were added since."""
    return _made(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _made(tokenizer: PreTrainedTokenizerBase, size: int) -> Marks:
    return Marks(tokenizer)


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> str:
    """Return the text of a response as verifiers, judges and programs read it."""
    return marks_of(tokenizer).response(ids)


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> str:
    """Return the text of ``ids`` without any special tokens."""
    return cast("str", cast("Any", tokenizer).decode(ids, skip_special_tokens=True))


def without(text: str, spans: Collection[Span]) -> str:
    """Return ``text`` without the parts at ``spans``, which are in order and apart."""
    parts, at = [], 0
    for begin, end in spans:
        parts.append(text[at:begin])
        at = end
    return "".join([*parts, text[at:]])
