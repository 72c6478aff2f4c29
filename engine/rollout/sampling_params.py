"""Sampling parameters and their checks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy.typing as npt

INT32 = 2**31 - 1
FLOAT32 = 3.4e38
SEEDS = (-(2**63), 2**64 - 1)
"""Seeds are taken modulo 2**64."""
TEMPERATURES = 1e-30, 1e30
"""Range of positive temperatures; outside it, logits divided by the temperature overflow or vanish in float32."""
MOST_RESPONSES = 1 << 16
MOST_TOP_LOGPROBS = 1024


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Raise ValueError unless ``value`` is an integer from ``least`` to ``most``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise ValueError(f"{name} is {reprlib.repr(value)}; give an integer from {least} to {most}.")


def check_text(name: str, text: str) -> None:
    """Raise ValueError if ``text`` contains a lone surrogate, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds {text[error.start]!r}, which is half a character (a lone surrogate); give valid Unicode."
        ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Parameters by which the responses of a prompt are sampled.

    Args:
        n: number of responses of each prompt (leaves of its tree).
        temperature: divides the logits; 0 takes the most likely token.
        top_p, top_k, min_p: restrict the support; log-probabilities are those of the restricted distribution.
        max_new_tokens: maximum number of response tokens, including the end-of-sequence token.
        stop: strings that end a response as soon as its text contains one. The token that completed it is kept.
        stop_token_ids: tokens that end a response, in addition to the model's end-of-sequence tokens; they are kept.
        logit_bias: values added to the logits of these tokens before the division by the temperature.
        allowed_token_ids: sample no other tokens; None allows all.
        prefix_allowed_tokens_fn: a grammar: maps a response so far (int32 ids) to the ids that may follow. It runs on
            the host for every token, drafted tokens included.
        top_logprobs: number of likeliest tokens to record at each position, for `Request.completions`.
        kept_tokens: also record the ids that each token was drawn from (neither filtered out nor forbidden), for
            `Request.completions`, in the form that ``kept`` of `linear_logprob` takes.
        adapter: name of the LoRA adapter to sample with (`NativeEngine.load_adapter`); None for the model without one.
        ignore_eos: continue after the model's end-of-sequence tokens.
        seed: seed of every prompt. Equal prompts get equal samples unless ``seeds`` of `RolloutEngine.generate` differ.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    n: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    prefix_allowed_tokens_fn: Callable[[npt.NDArray[Any]], Sequence[int]] | None = None
    top_logprobs: int = 0
    kept_tokens: bool = False
    adapter: str | None = None
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("SamplingParams.n", self.n, 1, MOST_RESPONSES)
        check_integer("SamplingParams.max_new_tokens", self.max_new_tokens, 1, INT32)
        check_integer("SamplingParams.top_logprobs", self.top_logprobs, 0, MOST_TOP_LOGPROBS)
        check_integer("SamplingParams.seed", self.seed, *SEEDS)
        if self.top_k is not None:
            check_integer("SamplingParams.top_k", self.top_k, 1, INT32)
        low, high = TEMPERATURES
        if not _is_number(self.temperature) or not (self.temperature == 0 or low <= self.temperature <= high):
            raise ValueError(
                f"SamplingParams.temperature is {self.temperature!r}; give 0 (greedy) or a number in [{low}, {high}]."
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p is {self.top_p!r}; give a number in (0, 1].")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p < 1):
            raise ValueError(f"SamplingParams.min_p is {self.min_p!r}; give a number in [0, 1), or None.")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(
                f"SamplingParams.stop is {reprlib.repr(self.stop)}; give a sequence of strings, none of them empty."
            )
        for text in self.stop:
            check_text("SamplingParams.stop", text)
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ValueError("SamplingParams.allowed_token_ids is empty; name the tokens allowed, or None for all.")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                check_integer(f"A token of SamplingParams.{name}", token, 0, INT32)
        if self.kept_tokens and not (self.top_p < 1 or self.top_k or self.min_p or self.constrained):
            raise ValueError(
                "SamplingParams.kept_tokens needs top_p, top_k, min_p or forbidden tokens: else all are kept."
            )
        for value in self.logit_bias.values():
            if not _is_number(value) or not (value == -math.inf or abs(value) <= FLOAT32):
                raise ValueError(
                    f"SamplingParams.logit_bias holds {value!r}; give numbers that are finite in float32, or -inf to "
                    "forbid a token."
                )
        if self.prefix_allowed_tokens_fn is not None and not callable(self.prefix_allowed_tokens_fn):
            raise ValueError("SamplingParams.prefix_allowed_tokens_fn cannot be called; give a function, or None.")

    @property
    def constrained(self) -> bool:
        """True if some tokens are biased or forbidden."""
        restricted = self.allowed_token_ids is not None or self.prefix_allowed_tokens_fn is not None
        return restricted or bool(self.logit_bias)
