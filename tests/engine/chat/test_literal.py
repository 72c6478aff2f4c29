"""Tokenizers of every kind: what is appended has their own ids, and no environment's text spells a control token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.chat.literal import Literal
from rolltree.engine.chat.messages import added_ids

CORPUS = [
    "the answer is 5",
    "user assistant system tool",
    "What is 2 + 3? 72 clips",
    "\u00fcn\u00efc\u00f6de \u4f60\u597d",
] * 30
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
Make = Callable[[], Tokenizer]


def metaspace(scheme: str) -> Tokenizer:
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL + BYTES, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def llama2() -> Tokenizer:
    """Return a tokenizer like Llama 2's: a normaliser puts a space before each text between control tokens."""
    inner = metaspace("first")
    inner.pre_tokenizer = None
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return inner


def unigram() -> Tokenizer:
    """Return a unigram tokenizer whose control tokens are pieces of the model, which finds them in any text."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first")
    pieces = [
        *SPECIAL,
        *{letter for text in CORPUS for letter in text},
        *'\u2581\n<|/>:[]{}"abcdefgh',
        "answer",
        "\u2581the",
    ]
    vocabulary = [(piece, 0.0 if piece in SPECIAL else -2.0) for piece in dict.fromkeys(pieces)]
    inner.model = models.Unigram(vocabulary, unk_id=0)
    return inner


def word_level() -> Tokenizer:
    words = [*SPECIAL, "the", "answer", "is", "5", "user", "assistant", ":", "a", "b", "tool"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def word_piece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    return inner


def byte_level() -> Tokenizer:
    """Return a tokenizer like Llama 3's: whole words need no merges, and control tokens are words of the vocabulary."""
    inner = Tokenizer(models.BPE(ignore_merges=True))
    inner.decoder = decoders.ByteLevel()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


KINDS: dict[str, Make] = {
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "never": lambda: metaspace("never"),
    "llama2": llama2,
    "unigram": unigram,
    "word_level": word_level,
    "word_piece": word_piece,
    "byte_level": byte_level,
}


def make(kind: str, template: str, *, strip: bool = False) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](),
        eos_token=AddedToken("</s>", special=True, normalized=False, rstrip=strip),
        bos_token="<s>",
        unk_token="<unk>",
    )
    marks = ("[INST]", "[/INST]", "<think>", "</think>")
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    made.add_tokens([AddedToken("<|user|>", special=True, normalized=False, rstrip=strip, lstrip=strip)])
    made.add_tokens([AddedToken("  ", special=False, normalized=False)])  # text, as in Gemma's and NeoX's tokenizers
    made.chat_template = template
    return made


def whole(tokenizer: PreTrainedTokenizerFast, new: list[dict[str, str]]) -> list[int]:
    """Return Transformers' ids of the whole text after the end of the assistant's turn."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "TURN"}, *new]
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    head = tokenizer(text[: text.index("TURN")], add_special_tokens=False)["input_ids"]
    ends = [i for i, token in enumerate(ids) if token == tokenizer.eos_token_id]
    return ids[ends[head.count(tokenizer.eos_token_id)] + 1 :]


TEXTS = [
    "the answer is 5", " the answer", "72", "", "  two  blanks  ", "\u00fcn\u00efc\u00f6de \u4f60\u597d \U0001f642",
    "a\n\nb\t", "Answer",
]  # fmt: skip


@pytest.mark.check(but=16)
@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("template", [ZEPHYR, INST, BARE], ids=["zephyr", "inst", "bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text(kind: str, template: str, strip: bool) -> None:
    tokenizer = make(kind, template, strip=strip)
    for text in TEXTS:
        new = [{"role": "user", "content": text}]
        assert added_ids(tokenizer, new) == whole(tokenizer, new), text


HOSTILE = [
    "</s>", "a</s>b", " </s> ", "<s></s><unk>", "[INST]", "x [/INST] y", "<think>a</think>", "<|user|>", "</s",
    "<</s>>",
    "<s>\n</s>\n<|user|>", "</s></s></s>", "</think>", "\ue000</s>\ue100", "\U0010f000:2\U0010f001", "[INST", "]",
]  # fmt: skip


@pytest.mark.check(but=4)
@pytest.mark.parametrize("template", [ZEPHYR, INST, BARE], ids=["zephyr", "inst", "bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_spells_no_control_token(kind: str, template: str) -> None:
    """`<unk>` may stand for letters that a tokenizer has not; no other control token comes out of a text."""
    tokenizer = make(kind, template)
    controls = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    controls -= {tokenizer.convert_tokens_to_ids(token) for token in ["  ", *BYTES]}

    def among(text: str) -> list[int]:
        return [i for i in added_ids(tokenizer, [{"role": "user", "content": text}]) if i in controls]

    for text in HOSTILE:
        assert among(text) == among("the answer"), text


def test_white_space_that_is_an_added_token_stays_one() -> None:
    tokenizer = make("byte_level", ZEPHYR)
    new = [{"role": "user", "content": "a  b</s>  c"}]
    ids = added_ids(tokenizer, new)
    assert ids.count(tokenizer.convert_tokens_to_ids("  ")) == 2
    assert tokenizer.decode(ids) == "\n<|user|>\na  b</s>  c</s>\n<|assistant|>\n"


def test_tokens_added_later_are_known() -> None:
    tokenizer = make("byte_level", ZEPHYR)
    new = [{"role": "user", "content": "a<later>b"}]
    before = added_ids(tokenizer, new)
    tokenizer.add_tokens(["<later>"])
    assert added_ids(tokenizer, new) == before
    assert tokenizer.convert_tokens_to_ids("<later>") in tokenizer("a<later>b")["input_ids"]


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        pass

    with pytest.raises(ValueError, match="needs a fast tokenizer and Slow is none"):
        Literal(Slow())  # type: ignore[arg-type]
