"""The stop text that ended a response, and where it is: the one place that looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

Array = npt.NDArray[Any]


class StopText(NamedTuple):
    """A stop text that a response has completed."""

    text: str
    tail: str
    """The text of the response from the stop text on, special tokens included."""


def tail_of(stops: Sequence[str]) -> int:
    """Return how many last tokens of a response surely hold a stop text that its last token completes."""
    # a token is at least one byte of the text; the tail may begin within a character, which then does not decode
    return max(len(text.encode()) for text in stops) + 4


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Array) -> str:
    """Return the text in which stop texts are looked for: with special tokens."""
    decode: Any = tokenizer.decode
    return str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def find_stop(tokenizer: PreTrainedTokenizerBase, response: Array, stops: Sequence[str]) -> StopText | None:
    """Return the first stop text in the end of a response; None if there is none."""
    if not stops or not len(response):
        return None
    text = text_of(tokenizer, np.asarray(response)[-tail_of(stops) :])
    found = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)
    return None if found is None else StopText(found[1], text[found[0] :])
