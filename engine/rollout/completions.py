"""Responses token by token, and the stop text that ended one: the only place that looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus

Array = npt.NDArray[Any]


class StopText(NamedTuple):
    """A stop text that a response has completed."""

    text: str
    tail: str
    """The text of the response from the stop text on, special tokens included."""


@dataclass(frozen=True)
class Completion:
    """A leaf's response, token by token; arrays are [tokens]."""

    token_ids: Array  # int32
    origin: Array  # int8, an Origin
    logprobs: Array  # float32, under the distribution sampled from; NaN where not sampled
    raw_logprobs: Array  # float32, under softmax(logits), without temperature, filters and biases
    entropies: Array  # float32, of softmax(logits / temperature)
    policy_versions: Array  # int32
    top: list[dict[int, float]]
    """Likeliest tokens at each position with their log-probs under softmax(logits), likeliest first; as many as
    ``SamplingParams.top_logprobs``."""
    kept: tuple[Array, Array] | None
    """Ids that each token was drawn from, with ``SamplingParams.kept_tokens``: indptr [tokens + 1] int64, ids int32.
    The list of a token that was not sampled is empty."""
    status: LeafStatus
    error: str | None
    stop: StopText | None = None
    """The text of ``SamplingParams.stop`` that ended it."""


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
    first = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)
    return None if first is None else StopText(first[1], text[first[0] :])
