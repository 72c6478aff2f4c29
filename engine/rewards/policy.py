"""The policy as the judge: the reward is the probability it gives to a continuation of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import UserError
from .interface import RewardItem, RewardResult, Rewards
from .remote import filled

Score = Callable[[list[str], list[str]], list[Any]]
"""Returns for each pair of texts the log-probs, float32 ``[tokens]``, of the second text after the first."""


class PolicyScorer(Rewards):
    """The reward is the mean probability or log-prob of the tokens of ``continuation`` after ``prompt``, computed with
    the sampling weights.

    With the reference answer as the continuation, it measures how well the response leads to it (VeriFree, arXiv
    2505.21493; RLPR, arXiv 2506.18254); with a question about the response and ``Yes``, the policy judges itself.

    Args:
        score: the engine's scoring function.
        prompt, continuation: texts in which ``{prompt}``, ``{problem}``, ``{response}`` and ``{answer}`` are replaced;
            the defaults are inferred.
        measure: the mean probability, or the mean log-prob (nats).

    Raises:
        UserError: ``prompt`` has no ``{response}``, ``continuation`` is empty, or ``measure`` is unknown.
    """

    in_turn = True

    def __init__(
        self,
        score: Score,
        prompt: str = "{prompt}{response}\nAnswer: ",
        continuation: str = "{answer}",
        measure: Literal["probability", "logprob"] = "probability",
    ) -> None:
        what = "reward.verifier = 'policy'"
        if "{response}" not in prompt or not continuation:
            raise UserError(f"{what} needs a prompt with {{response}} and a continuation.")
        if measure not in ("probability", "logprob"):
            raise UserError(f"{what} has no measure '{measure}'; use probability or logprob.")
        self._score, self._prompt, self._continuation, self._measure = score, prompt, continuation, measure

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        found = self._score(
            [filled(self._prompt, item) for item in items], [filled(self._continuation, item) for item in items]
        )
        return [self._verdict(np.asarray(logprobs, np.float64)) for logprobs in found]

    def _verdict(self, logprobs: Any) -> RewardResult:
        if not len(logprobs):
            return RewardResult(None, None, skipped="no_continuation")
        value = float((np.exp(logprobs) if self._measure == "probability" else logprobs).mean())
        if not np.isfinite(value):
            return RewardResult(None, f"the policy's log-probs give {value:g}, which is not finite")
        return RewardResult(value, None)
