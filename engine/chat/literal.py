"""Token ids of text in which only the chat template's own control tokens count as such.

A control token is an added token of the tokenizer, special or not, that is more than white space: ``<|im_end|>``,
``<tool_call>``, ``</think>``. An environment's text may spell one; it must reach the model as ordinary characters. The
tokenizer is copied with every control token renamed to a private name, so that text can no longer spell one, and the
template's own control tokens are written by these names. One call tokenises the whole text, so that normalisation,
pre-tokenisation and the white space next to control tokens are the tokenizer's own.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

NONCE = secrets.token_hex(8)
"""A part of the private names, so that no text can hold one by intent; results do not depend on it."""
FIRST_PRIVATE = 0xE100
"""The first code point that may stand for a character; Unicode gives U+E000 to U+F8FF no meaning."""
AS_THEY_ARE = ("role", "type")
"""Entries of a message that templates compare."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A piece that stands for a byte; models with byte fallback look it up by this name."""


class Literal:
    """Tokenises text that a chat template wrote around an environment's messages.

    Args:
        tokenizer: needs a fast one, of the `tokenizers` library.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"environment needs a fast tokenizer and {type(tokenizer).__name__} is none; convert it to a "
                "tokenizer.json."
            )
        added = {token: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        controls = {token: id_ for token, id_ in added.items() if token.content.strip()}
        self._names = {token.content: f"\U0010f000{NONCE}:{id_}\U0010f001" for token, id_ in controls.items()}
        self._tokenizer = _renamed(json.loads(backend.to_str()), self._names)
        named = {self._names.get(token.content, token.content): id_ for token, id_ in added.items()}
        self._ids = {self._tokenizer.token_to_id(name): id_ for name, id_ in named.items()}
        self._texts = {id_: token.content for token, id_ in controls.items()}
        self.controls = _either(
            rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
            for token in sorted(controls, key=lambda token: -len(token.content))
        )
        ends = ((text := token.content.strip())[0] + text[-1] for token in controls)
        self._edges = sorted(set("".join(ends)))

    def text(self, token_id: int) -> str | None:
        """Return the text of a control token; None where ``token_id`` is none."""
        return self._texts.get(token_id)

    def disguise(self, rendered: str) -> Disguise:
        """Return a disguise whose private characters do not occur in ``rendered``."""
        return Disguise(self._edges, rendered)

    def ids(self, end: int | None, disguised: str, disguise: Disguise) -> list[int]:
        """Return the ids of a text that follows the token ``end``.

        Args:
            end: the id of a control token; white space after it is kept or dropped as the tokenizer does. None: the
                text follows none.
            disguised: the text, in which what is no template's is disguised.

        Raises:
            ValueError: ``end`` is no control token, or does not come out as itself.
        """
        named = self.controls.sub(lambda match: self._names[match[0]], disguised)
        if end is None:
            encoded = self._tokenizer.encode(disguise.lift(named), add_special_tokens=False)
            return [self._ids.get(i, i) for i in encoded.ids]
        if end not in self._texts:
            raise ValueError(f"The end-of-sequence token {end} is no added token of the tokenizer; add it as one.")
        text = self._names[self._texts[end]] + disguise.lift(named)
        first, *ids = (self._ids.get(i, i) for i in self._tokenizer.encode(text, add_special_tokens=False).ids)
        if first != end:
            raise ValueError(f"The tokenizer does not keep its token {self._texts[end]!r} apart from what follows it.")
        return ids


class Disguise:
    """Private characters in place of those that control tokens begin or end with.

    A text in disguise spells no control token, alone or with the text around it, and template filters treat it as the
    text itself: none of the characters is white space, a quotation mark's escape or a letter's case.
    """

    def __init__(self, edges: Collection[str], rendered: str) -> None:
        there = set(rendered)
        free = (chr(point) for point in range(FIRST_PRIVATE, 0xF900) if chr(point) not in there)
        self._put = dict(zip(edges, free, strict=False))
        if len(self._put) < len(edges):
            raise ValueError("An environment's text uses nearly all private characters of Unicode; leave some out.")
        self._putting = str.maketrans(self._put)
        self._lifting = str.maketrans({private: plain for plain, private in self._put.items()})

    def put(self, value: Any) -> Any:
        """Return ``value`` with every text in it disguised; keys stay."""
        if isinstance(value, str):
            return value.translate(self._putting)
        if isinstance(value, Mapping):
            return {key: inner if key in AS_THEY_ARE else self.put(inner) for key, inner in value.items()}
        return [self.put(inner) for inner in value] if isinstance(value, list | tuple) else value

    def lift(self, text: str) -> str:
        """Return ``text`` without the disguise."""
        return text.translate(self._lifting)


def literal(tokenizer: PreTrainedTokenizerBase) -> Literal:
    """Return the tokenizer's `Literal`, made once and again where tokens were added since."""
    return _made(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _made(tokenizer: PreTrainedTokenizerBase, size: int) -> Literal:
    return Literal(tokenizer)


def _either(patterns: Any) -> re.Pattern[str]:
    """Match the first of ``patterns`` that fits; the longest token comes first, as in the tokenizer."""
    return re.compile("|".join(patterns) or r"(?!)")


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json with its control tokens called by ``names``, in the model too."""
    model: dict[str, Any] = spec["model"]

    def piece(text: str) -> str:
        return text if model.get("byte_fallback") and BYTE.fullmatch(text) else names.get(text, text)

    if isinstance(model["vocab"], dict):
        lost: set[str] = {text for text in names if text in model["vocab"] and piece(text) != text}
        model["vocab"] = {piece(text): id_ for text, id_ in model["vocab"].items()}
        there = set(model["vocab"].values())
        # ids of added tokens follow the number of pieces, so that a gap would let one meet a piece's id
        gaps = (id_ for id_ in range(max(there, default=-1) + 1) if id_ not in there)
        model["vocab"] |= {f"\U0010f002{NONCE}:{id_}": id_ for id_ in gaps}
    else:
        lost = set()
        model["vocab"] = [[piece(text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = piece(model["unk_token"])
    if lost and "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not lost & {a, b, a + b}]
    for token in spec["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "normalized": False}
    return Tokenizer.from_str(json.dumps(spec | {"truncation": None, "padding": None, "post_processor": None}))
