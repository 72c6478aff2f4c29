"""Joined, the bytes of an answer's tokens are its text, also where a token is only a part of a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rolltree.engine.protocols.token_bytes import TokenBytes, alphabet

from ...support.serving import tokenizer

TEXTS = ["plain", "caf\u00e9 \u4f60\u597d", "\U0001f680", "really \ufffd", "\x00\x7f\u00a0\u00ad~", " \n\t"]


def pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: a blank is part of a piece, and a character that is no piece is its bytes."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "p", "l"]
    made = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(vocabulary)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("words", [tokenizer(), pieces()], ids=["bytes", "pieces"])
def test_bytes_of_tokens_are_the_text(words: PreTrainedTokenizerFast, text: str) -> None:
    known, ids = TokenBytes(words), words(text, add_special_tokens=False)["input_ids"]
    assert b"".join(known.of(token) or b"?" for token in ids) == text.encode()
    assert sum(map(known.width, ids)) == len(text)
    for token in ids:
        spelt, name = known.of(token), known.name(token)
        assert spelt is not None
        assert name.encode() == spelt or name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def test_every_byte_has_a_letter() -> None:
    assert sorted(alphabet().values()) == list(range(256))
    known, words = TokenBytes(tokenizer()), tokenizer()
    names = [known.name(token) for token in range(256)]
    assert len(set(names)) == 256  # alternatives in a form that has names as keys
    assert known.name(words.eos_token_id) == "<end>"
    assert known.of(words.eos_token_id) == b"<end>"


def test_a_word_has_the_bytes_of_its_text() -> None:
    made = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "caf": 1, "##\u00e9": 2, "\ufffd": 3}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    known = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]"))
    assert known.of(1) == b" caf"  # as after another word
    assert known.of(3) is None
