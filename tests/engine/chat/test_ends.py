"""One token ends turns that are sampled and turns that are given: the one that the chat template writes."""

from __future__ import annotations

from typing import Any

import pytest

from rolltree.engine.chat.ends import end_token_ids, template_end, turn_end, unlisted_end

from ...support import chat_templates as templates

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def tokenizer(template: str, *eos: str) -> Any:
    return templates.byte_tokenizer(template, (*eos, "<|im_end|>", "<|endoftext|>"))


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_the_template_says_what_ends_a_turn(eos: str) -> None:
    made = tokenizer(TURNS, eos)
    end, of_text = made.convert_tokens_to_ids(["<|im_end|>", eos])
    assert (turn_end(made, chat=True), turn_end(made, chat=False)) == (end, of_text)
    assert end_token_ids(made, {"eos_token_id": [7]}, {}) == {7, end, of_text}


def test_a_model_that_does_not_list_the_end_is_told() -> None:
    made = tokenizer(TURNS, "<|endoftext|>")
    end = made.convert_tokens_to_ids("<|im_end|>")
    said = "ends turns with <|im_end|>, which is not among the model's end-of-sequence tokens (<|endoftext|>)"
    assert said in unlisted_end(made, {"eos_token_id": None})
    assert unlisted_end(made, {"eos_token_id": [end]}) == ""
    assert unlisted_end(tokenizer(TURNS, "<|im_end|>")) == ""


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}\n{% endfor %}", "x"]
)
def test_a_template_that_writes_no_end_leaves_the_tokenizers(template: str) -> None:
    made = tokenizer(template, "<|endoftext|>")
    assert template_end(made) is None
    assert turn_end(made, chat=True) == made.eos_token_id
