"""The tokens that end a turn of the model: those of its configurations, and the one that its chat template writes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from .rendering import render

TURN = "TURN0TEXT"
"""Stands for what an assistant says."""


def end_token_ids(tokenizer: PreTrainedTokenizerBase | None, *sources: Any) -> set[int]:
    """Return the tokens that end a turn: samples end with any of them.

    Args:
        sources: configurations of the model, each of which has one end-of-sequence token, several or none.
    """
    listed = _listed(*sources, tokenizer)
    written = None if tokenizer is None else template_end(tokenizer)
    return listed if written is None else listed | {written}


def unlisted_end(tokenizer: PreTrainedTokenizerBase, *sources: Any) -> str:
    """Return a sentence where the chat template ends turns with a token that neither the tokenizer nor the model's
    configurations list, as with base models; "" where they do."""
    written, listed = template_end(tokenizer), _listed(*sources, tokenizer)
    if written is None or written in listed:
        return ""
    end, *others = (str(tokenizer.decode([token])) for token in (written, *sorted(listed)))
    return (
        f"the chat template ends turns with {end}, which is not among the model's end-of-sequence tokens "
        f"({', '.join(others) or 'none'}); responses end with it too"
    )


def _listed(*sources: Any) -> set[int]:
    ids: set[int] = set()
    for source in sources:
        eos = source.get("eos_token_id") if isinstance(source, Mapping) else getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return ids


def turn_end(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> int | None:
    """Return the token that ends a given turn; None if the tokenizer has none.

    Args:
        chat: the turn is one of a chat, so that its template's end is the end.
    """
    written = template_end(tokenizer) if chat else None
    return tokenizer.eos_token_id if written is None else written


def template_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends an assistant's turn; None without a template, or where it
    writes no token after a turn."""
    if not tokenizer.chat_template:
        return None
    return _written(tokenizer, len(tokenizer), str(tokenizer.chat_template), tokenizer.eos_token_id)


@functools.lru_cache(maxsize=32)
def _written(tokenizer: PreTrainedTokenizerBase, size: int, template: str, eos: int | None) -> int | None:
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
    try:
        _, _, after = render(tokenizer, talk, None, generation=False).rpartition(TURN)
    except ValueError:
        return None
    tokens = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    longest_first = sorted(tokens, key=len, reverse=True)
    ids = [tokens[text] for text in re.findall("|".join(map(re.escape, longest_first)) or r"(?!)", after)]
    return eos if eos in ids else next(iter(ids), None)
