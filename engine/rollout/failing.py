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
        max_tokens: length of the response that is asked for, in tokens.
        limit: tokens that both may have together.
    """

    def __init__(self, message: str, prompt: int, max_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.prompt, self.max_tokens, self.limit = prompt, max_tokens, limit


def check_prompt(prompt: int, longest: int | None) -> None:
    """Raise TooLongError if a prompt of ``prompt`` tokens has more than the model's ``longest`` positions."""
    if longest is not None and prompt > longest:
        message = f"Prompt 0 of {prompt} tokens exceeds the model's {longest} positions; shorten it."
        raise TooLongError(message, prompt, 0, longest)


def check_length(index: int, prompt: int, most: int, longest: int | None) -> None:
    """Raise TooLongError if prompt ``index`` of ``prompt`` tokens has no room for a response of ``most`` tokens.

    Args:
        longest: positions of the model; None without a limit.
    """
    if longest is not None and prompt + most > longest:
        raise TooLongError(
            f"Prompt {index} of {prompt} tokens and max_new_tokens={most} exceed the model's {longest} positions; "
            "shorten them.", prompt, most, longest,
        )  # fmt: skip


def by_its_constraints(params: SamplingParams, error: str) -> bool:
    """Return whether a response failed by the constraints of its own request, and not by the engine."""
    return params.constrained and error != NOT_FINITE
