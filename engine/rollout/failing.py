"""The reasons for which a request is refused or a response fails, where callers tell one from another."""

from __future__ import annotations

from .sampling_params import SamplingParams

NOT_FINITE = "the model's logits were not finite"
NOTHING_LEFT = "biases, allowed tokens and schema together leave no token that may follow"


class TooLongError(ValueError):
    """A prompt that is too long for the engine, alone or with the response that is asked for.

    Args:
        message: one sentence that names the limit and the remedy.
        prompt: length of the prompt, in tokens.
        asked: length of the response that is asked for, in tokens.
        limit: tokens that both may have together.
    """

    def __init__(self, message: str, prompt: int, asked: int, limit: int) -> None:
        super().__init__(message)
        self.prompt, self.asked, self.limit = prompt, asked, limit


def by_its_constraints(params: SamplingParams, error: str) -> bool:
    """Return whether a response failed by the constraints of its own request, and not by the engine."""
    return params.constrained and error != NOT_FINITE
