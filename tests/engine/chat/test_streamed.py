"""Text of a stream, piece by piece: equal to that of all its tokens at once, whatever the tokenizer and the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rolltree.engine.chat.detokenize import MOST_HELD, UNFINISHED, Detokenizer
from rolltree.engine.chat.streamed import Streamed
from rolltree.engine.chat.tool_formats import FORMATS

BYTES = [f"<0x{i:02X}>" for i in (0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
PIECES = ["▁", "▁▁", "▁Hello", "world", "▁a", "!", ".", ",", "'", "▁'", "n't", "▁n", "s", "▁s", "\n", "你", "\ufffd"]
LETTERS = "ab<>tol_c \n"
DROPS_BLANK = decoders.Strip(" ", 1, 0)


def fast(model: models.Model, decoder: decoders.Decoder | None, **options: bool) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    if decoder is not None:
        made.decoder = decoder
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **options)
    found.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return found


def vocabulary(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *pieces])}


def byte_level() -> PreTrainedTokenizerFast:
    # characters stand for bytes as GPT-2 has it; whole characters, parts of them, bytes that never begin one
    pieces = [
        "Ġ",
        "Ġthe",
        "a",
        "ä",
        "½",
        "ł",
        "ä½",
        "łä",
        "ð",
        "ðŁ",
        "ĺ",
        "Ģ",
        "ĺĢĠx",
        "ÿ",
        "ï",
        "¿½",
        "Ċ",
        "!",
        "Ł",
        "ĺä",
    ]
    return fast(models.BPE(vocab=vocabulary(pieces), merges=[]), decoders.ByteLevel())


def sentencepiece(*last: decoders.Decoder) -> PreTrainedTokenizerFast:
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    made = models.BPE(vocab=vocabulary(PIECES + BYTES), merges=[], unk_token="<unk>", byte_fallback=True)
    return fast(made, decoders.Sequence(chain))


def unigram(cleans: bool) -> PreTrainedTokenizerFast:
    pieces = [(piece, -1.0) for piece in vocabulary(PIECES)]
    decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return fast(models.Unigram(pieces, 0, False), decoder, clean_up_tokenization_spaces=cleans)


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["the", "##n", "'", "s", "t", "don", ".", ",", "n't", "##'", "你", "m", "re"]
    made = models.WordPiece(vocab=vocabulary(pieces), unk_token="<unk>")
    return fast(made, decoders.WordPiece(prefix="##", cleanup=True), clean_up_tokenization_spaces=True)


def suffixes() -> PreTrainedTokenizerFast:
    pieces = ["the</w>", "th", "e</w>", "你", "!</w>", "</w>"]
    return fast(models.BPE(vocab=vocabulary(pieces), merges=[], end_of_word_suffix="</w>"), decoders.BPEDecoder("</w>"))


def letters() -> PreTrainedTokenizerFast:
    return fast(models.WordLevel(vocab=vocabulary(list(LETTERS)), unk_token="<unk>"), decoders.Fuse())


def bare() -> PreTrainedTokenizerFast:
    return fast(models.WordLevel(vocab=vocabulary(["a", "b", "."]), unk_token="<unk>"), None)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_level,
    "sentencepiece, drops a blank": lambda: sentencepiece(DROPS_BLANK),
    "sentencepiece": sentencepiece,
    "unigram": lambda: unigram(False),
    "unigram, cleaned": lambda: unigram(True),
    "wordpiece, cleaned": wordpiece,
    "suffixes": suffixes,
    "letters": letters,
    "no decoder": bare,
}


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    return MAKERS[name]()


def pieces_of(made: PreTrainedTokenizerBase, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer, pieces, at = Detokenizer(made), [], 0
    while at < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        text, marks = detokenizer.add(ids[at : at + size])
        pieces.append(text)
        assert not marks
        at += size
    return pieces


LAST = {"wordpiece, cleaned": "你", "unigram, cleaned": "你", "suffixes": "the</w>", "byte level": "!", "letters": "a"}
"""A piece that finishes what was held, and is whole itself; "." for other tokenizers."""


@pytest.mark.slow(but=1)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 40), max_size=40), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pieces_are_the_text_of_the_whole(name: str, ids: list[int], sizes: list[int]) -> None:
    made = tokenizer(name)
    assert made.decode(ids, skip_special_tokens=True).startswith("".join(pieces_of(made, ids, sizes)))
    ids = [*ids, made.convert_tokens_to_ids(LAST.get(name, "."))]
    assert "".join(pieces_of(made, ids, sizes)) == made.decode(ids, skip_special_tokens=True)


def ids_of(name: str, *pieces: str) -> list[int]:
    found = tokenizer(name).convert_tokens_to_ids(list(pieces))
    assert None not in found
    return found  # type: ignore[return-value]


def test_a_character_is_sent_once_when_its_last_byte_has_come() -> None:
    bad = UNFINISHED
    ids = ids_of("byte level", "a", "ä", "½", "ł", "ðŁ", "ĺ", "Ģ", "ä½", "ÿ", "!")
    assert pieces_of(tokenizer("byte level"), ids, [1]) == ["a", "", "", "你", "", "", "😀", "", bad, f"{bad}!"]


@pytest.mark.parametrize("last", [("ð", "Ł", "ĺä"), ("ä", "½"), ("ð", "Ł", "ĺ")])
def test_what_is_forgotten_ends_where_a_character_does(last: tuple[str, ...]) -> None:
    made = tokenizer("byte level")
    ids = ids_of("byte level", *["ÿ"] * (MOST_HELD + 1), *last)
    rest = ids_of("byte level", "½", "ł", "Ģ", "!")
    assert "".join(pieces_of(made, ids + rest, [len(ids), 1])) == made.decode(ids + rest)


def test_special_tokens_and_unknown_ids_do_not_take_a_blank_away() -> None:
    name = "sentencepiece, drops a blank"
    hello, world, end, think = ids_of(name, "▁Hello", "world", "</s>", "<think>")
    for between in ([end], [999], [end, end, 999], []):
        pieces = pieces_of(tokenizer(name), [end, hello, *between, hello, think, hello, world], [1])
        assert "".join(pieces) == "Hello Hello<think> Helloworld"
        assert pieces[1] == "Hello"
        assert pieces[2 + len(between)] == " Hello"


def test_bytes_are_held_while_the_next_one_can_make_all_of_them_invalid() -> None:
    name = "sentencepiece"
    tokens = ids_of(name, "<0xE4>", "<0xBD>", "<0xA0>", "<0x41>", ".", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", ".")
    invalid = UNFINISHED * 4
    assert pieces_of(tokenizer(name), tokens, [1]) == ["", "", "", "", "你A.", "", "", "", "", f"{invalid}."]


@pytest.mark.parametrize(
    "pieces", [("a", "Ġthe"), ("ä",), ("ÿ",), ("ä", "½"), ("ð", "Ċ"), ("ï", "¿½", "ä½"), ("ĺĢĠx",)]
)
def test_the_cost_of_a_token_does_not_grow(pieces: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made = byte_level()
    ids = tokenizer("byte level").convert_tokens_to_ids(list(pieces)) * (2000 // len(pieces))
    decoded = 0
    decode = made.decode

    def counted(tokens: list[int], **options: bool) -> object:
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens, **options)

    monkeypatch.setattr(made, "decode", counted)
    text = "".join(pieces_of(made, ids, [1]))
    assert decode(ids)[: len(text)] == text
    assert len(decode(ids)) - len(text) <= 1
    assert decoded <= 4 * MOST_HELD * len(ids)


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(LETTERS, max_size=30),
    stop=st.lists(st.text("ab<> ", min_size=1, max_size=4), max_size=2),
    marked=st.booleans(),
)
def test_what_is_sent_ends_before_a_stop_text_or_a_call(text: str, stop: list[str], marked: bool) -> None:
    """A character a token, against the definition on the whole text."""
    letters, text = tokenizer("letters"), text + "<tool_call>" * marked + text
    complete = [i for i in range(len(text)) if any(text[:i].endswith(one) for one in stop)]
    text = text[: complete[0]] if complete else text  # an engine ends where a stop text is complete
    streamed = Streamed(letters, stop, FORMATS["hermes"] if marked else None)
    for letter in text:
        streamed.add([letters.convert_tokens_to_ids(letter)])
    ends = [at for one in stop if (at := text.find(one)) >= 0]
    cut = text[: min(ends, default=len(text))]
    assert cut.startswith(streamed.text)
    expected = text[: max(len(text) - max(map(len, stop), default=0), 0)]  # of a stop text all but its last character
    if marked:  # `<tool_call>` calls something once a brace follows it
        begun = regex.search(r"<tool_call>\s*\{", expected, partial=True)
        expected = (expected if begun is None else expected[: begun.start()]).rstrip()
    assert streamed.text == expected
