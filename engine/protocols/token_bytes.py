"""The bytes of each token: those of a text, of which a token may hold parts of characters."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from ..chat.detokenize import BYTE_TOKEN

BLANK = "\u2581"
"""The character that SentencePiece's vocabularies have for a blank."""


class TokenBytes:
    """The bytes of a tokenizer's tokens in the middle of a text, by its decoder.

    Byte-level vocabularies spell each byte by a character; those of SentencePiece have a token for each byte that is no
    piece. With another decoder a token has the bytes of its text, and none if that text is not all of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._special = frozenset(tokenizer.all_special_ids)
        kinds, replaced = _decoder(tokenizer)
        self._byte_level = kinds <= {"ByteLevel"} and bool(kinds)
        self._pieces = kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and (
            "Metaspace" in kinds or replaced == {(BLANK, " ")}
        )

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are not known."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and token not in self._added:
            if self._byte_level and all(letter in alphabet() for letter in piece):
                return bytes(alphabet()[letter] for letter in piece)
            if not self._byte_level and BYTE_TOKEN.fullmatch(piece):
                return bytes([int(piece[3:5], 16)])
            if self._pieces:
                return piece.replace(BLANK, " ").encode()
        text = self._text(token)
        return None if "\ufffd" in text else text.encode()

    def name(self, token: int) -> str:
        """Return the token's text; of a token that is a part of a character, its bytes as OpenAI writes them."""
        raw = self.of(token)
        if raw is None:
            return self._text(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def width(self, token: int) -> int:
        """Return the number of characters that begin in a token."""
        raw = self.of(token)
        return len(self._text(token)) if raw is None else sum(byte & 0xC0 != 0x80 for byte in raw)

    def _text(self, token: int) -> str:
        """Return the token's text inside a text: alone, SentencePiece's decoders drop the blank that it begins with."""
        alone = cast("str", self._tokenizer.decode([token], skip_special_tokens=False))
        if token in self._special:
            return alone
        twice = cast("str", self._tokenizer.decode([token, token], skip_special_tokens=False))
        return twice[len(alone) :] if twice == f"{alone} {alone}" else alone


@lru_cache(1)
def alphabet() -> dict[str, int]:
    """Return the bytes of the characters of byte-level vocabularies: printable ones of Latin-1 stand for themselves,
    the others, in their order, have those from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _decoder(tokenizer: PreTrainedTokenizerBase) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the types of the parts of a tokenizer's decoder, and the texts that it replaces."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else json.loads(backend.to_str()).get("decoder")
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replaced = {(str(p["pattern"].get("String")), p["content"]) for p in parts if p["type"] == "Replace"}
    return {part["type"] for part in parts}, replaced
