"""The policy as the judge: the reward follows from the probability that it gives to a continuation of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..chat.reasoning import without_reasoning
from ..errors import UserError
from .interface import RewardItem, RewardResult, Rewards
from .remote import filled

Score = Callable[[list[str], list[str]], list[Any]]
"""Returns for each pair of texts the log-probs, float32 ``[tokens]``, of the second text after the first."""


MEASURES: dict[str, Callable[[Any], float]] = {
    "probability": lambda logprobs: np.exp(logprobs).mean(),
    "logprob": lambda logprobs: logprobs.mean(),
    "product": lambda logprobs: np.exp(logprobs.sum()),
    "gain": lambda logprobs: np.exp(logprobs).mean(),
}
"""Functions of the continuation's log-probs ``[tokens]``; `gain` compares two of their values."""


class PolicyScorer(Rewards):
    """The reward is computed from the log-probs of ``continuation`` after ``prompt``, under the sampling weights.

    With the reference answer as the continuation, it measures how well the response leads to it; with a question about
    the response and ``Yes``, the policy judges itself. Measures: the mean ``probability`` of the tokens; the mean
    ``logprob`` (nats); the ``product`` of the probabilities, as in VeriFree (arXiv 2505.21493); the ``gain``, as in
    RLPR (arXiv 2506.18254): the mean probability less that after ``prompt`` with an empty response, within [0, 1] (the
    limits are inferred).

    Args:
        score: the engine's scoring function.
        prompt, continuation: texts in which ``{prompt}``, ``{problem}``, ``{response}`` and ``{answer}`` are replaced;
            the defaults are inferred.
        measure: probability, logprob, product or gain.
        mark: text with which an answer begins in a response. If given, ``{response}`` stands for the response before
            its last mark, so that the reference answer replaces the response's own, as in both papers; a response
            without it, or with it in its reasoning alone, has the reward 0, or is skipped with the measure ``logprob``.

    Raises:
        UserError: ``prompt`` has no ``{response}``, ``continuation`` or ``mark`` is empty, or ``measure`` is unknown.
    """

    in_turn = True

    def __init__(
        self,
        score: Score,
        prompt: str = "{prompt}{response}\nAnswer: ",
        continuation: str = "{answer}",
        measure: str = "probability",
        mark: str | None = None,
    ) -> None:
        what = "reward.verifier = 'policy'"
        if "{response}" not in prompt or not continuation or mark == "":
            raise UserError(f"{what} needs a prompt with {{response}}, a continuation and a mark that are not empty.")
        if measure not in MEASURES:
            raise UserError(f"{what} has no measure '{measure}'; use one of {', '.join(MEASURES)}.")
        self._score, self._prompt, self._continuation = score, prompt, continuation
        self._measure, self._mark = measure, mark

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        cut = [self._before_mark(item.response_text) for item in items]
        scored = [replace(item, response_text=text) for item, text in zip(items, cut, strict=True) if text is not None]
        if self._measure == "gain":
            scored += [replace(item, response_text="") for item in scored]
        values = [self._value(logprobs) for logprobs in self._score(
            [filled(self._prompt, item) for item in scored], [filled(self._continuation, item) for item in scored]
        )]  # fmt: skip
        if self._measure == "gain":
            half = len(values) // 2
            pairs = zip(values[:half], values[half:], strict=True)
            values = [None if now is None or base is None else min(max(now - base, 0.0), 1.0) for now, base in pairs]
        left = iter(values)
        return [self._unmarked() if text is None else _verdict(next(left)) for text in cut]

    def _before_mark(self, text: str) -> str | None:
        """Return the part of a response before its answer; None if it marks none."""
        if self._mark is None:
            return text
        before, mark, _ = text.rpartition(self._mark)
        answer = without_reasoning(text)
        follows = (
            len(before + mark) >= text.rfind(answer) if answer.strip() else bool(without_reasoning(f"{before}{mark}."))
        )
        return before if mark and follows else None

    def _value(self, logprobs: Any) -> float | None:
        """Return the measure of the log-probs ``[tokens]`` of a continuation; None if it has no tokens."""
        return float(MEASURES[self._measure](np.asarray(logprobs, np.float64))) if len(logprobs) else None

    def _unmarked(self) -> RewardResult:
        if self._measure == "logprob":
            return RewardResult(None, None, skipped="no_mark")
        return RewardResult(0.0, None, unparsed="no_mark")


def _verdict(value: float | None) -> RewardResult:
    if value is None:
        return RewardResult(None, None, skipped="no_continuation")
    if not np.isfinite(value):
        return RewardResult(None, f"the policy's log-probs give {value:g}, which is not finite")
    return RewardResult(value, None)
