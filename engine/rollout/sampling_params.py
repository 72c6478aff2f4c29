"""How responses are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy.typing as npt

_INT32 = 2**31 - 1
_INTEGERS = (  # name, least, most, in words
    ("n", 1, _INT32, "at least one response"),
    ("max_new_tokens", 1, _INT32, "at least one token"),
    ("top_k", 1, _INT32, "at least 1, or None for all tokens"),
    ("top_logprobs", 0, _INT32, "0 or more"),
    ("seed", -(2**63), 2**64 - 1, "an integer of 64 bits"),
)


def _is_integer(value: object, least: int, most: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most


@dataclass(frozen=True)
class SamplingParams:
    """How the responses of a prompt are sampled.

    Args:
        n: responses of each prompt (leaves of its tree).
        temperature: divides the logits; 0 takes the most likely token.
        top_p, top_k, min_p: restrict the support; log-probabilities are those of the restricted distribution.
        max_new_tokens: longest response, its end-of-sequence token included.
        stop: strings that end a response as soon as its text holds one. The response keeps the token that completed it.
        stop_token_ids: tokens that end a response, besides the model's end-of-sequence tokens. The response keeps it.
        logit_bias: added to the logits of these tokens before the temperature divides them.
        allowed_token_ids: sample no other tokens; None allows all.
        prefix_allowed_tokens_fn: given a response so far (int32 ids), the ids that may follow: a grammar. It runs on
            the host for every token of every response that has one.
        top_logprobs: how many of the likeliest tokens to keep beside each one sampled, for `Request.completions`.
        kept_tokens: also keep which ids each token was drawn from, for `Request.completions`: what was not filtered
            out or forbidden, as ``kept`` of `linear_logprob` takes it.
        adapter: name of the LoRA adapter to sample with (`NativeEngine.load_adapter`); None for the model as it is.
        ignore_eos: go on after the model's end-of-sequence tokens.
        seed: of every prompt; prompts that should differ though their tokens are equal need ``seeds`` of their own.

    Raises:
        ValueError: a value makes no sense.
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
        for name, least, most, wanted in _INTEGERS:
            if not _is_integer(value := getattr(self, name), least, most) and not (value is None and name == "top_k"):
                raise ValueError(f"SamplingParams.{name} is {value!r}; give {wanted}, at most {most}.")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if (isinstance(value, bool) or not isinstance(value, Real)) and not (value is None and name == "min_p"):
                raise ValueError(f"SamplingParams.{name} is {value!r}; give a number.")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not _is_integer(token, 0, _INT32):
                    raise ValueError(f"SamplingParams.{name} names token {token!r}; give ids in 0..{_INT32}.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"SamplingParams.temperature is {self.temperature}; give 0 (greedy) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p is {self.top_p}; give a number in (0, 1].")
        if self.min_p is not None and not 0 <= self.min_p < 1:
            raise ValueError(f"SamplingParams.min_p is {self.min_p}; give a number in [0, 1), or None.")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"SamplingParams.stop is {self.stop!r}; give a sequence of strings, none of them empty.")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ValueError("SamplingParams.allowed_token_ids is empty; name the tokens allowed, or None for all.")
        if self.kept_tokens and not (self.top_p < 1 or self.top_k or self.min_p or self.constrained):
            raise ValueError(
                "SamplingParams.kept_tokens needs top_p, top_k, min_p or forbidden tokens: else all are kept."
            )
        for text in self.stop:
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError(f"SamplingParams.stop is {self.stop!r}; a lone surrogate is no text.")
        if any(isinstance(value, bool) or not isinstance(value, Real) for value in self.logit_bias.values()):
            raise ValueError(f"SamplingParams.logit_bias is {self.logit_bias!r}; give a number for each token.")
        if any(not value < float("inf") for value in self.logit_bias.values()):
            raise ValueError("SamplingParams.logit_bias holds NaN or infinity; give finite numbers, or -inf to forbid.")

    @property
    def constrained(self) -> bool:
        """Whether some tokens are biased or forbidden."""
        given = self.allowed_token_ids is not None or self.prefix_allowed_tokens_fn is not None
        return given or bool(self.logit_bias)
