"""Checks of what a request asks for: its token ids, sampling parameters and pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..data.media import FIRST_ID, Picture, PromptMedia
from .sampling_params import SamplingParams, check_text

Array = npt.NDArray[Any]


def token_ids(
    index: int,
    prompt: Sequence[int] | str,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    placeholders: Collection[int] = (),
    pictures: Sequence[Picture] = (),
) -> Array:  # [P] int32
    """Return the token ids of prompt ``index``.

    Args:
        vocabulary: number of tokens of the model.
        placeholders: tokens that stand for pictures, which no prompt holds.
        pictures: those of the prompt; the ids of their rows are above the vocabulary.

    Raises:
        ValueError: the prompt is empty or holds something else than tokens of the model.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("Prompts are given as text but the engine has no tokenizer; pass one, or token ids.")
        check_text(f"Prompt {index}", prompt)
        prompt = tokenizer(prompt)["input_ids"]
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):  # lists of different lengths
        ids = np.zeros((1, 0))
    if ids.shape == (0,):
        raise ValueError(f"Prompt {index} is empty; a prompt needs at least one token.")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"Prompt {index} is neither a text nor a list of integer token ids that fit 64 bits.")
    words = ids[ids < FIRST_ID] if len(pictures) else ids
    if (ids.min() < 0 or words.max(initial=0) >= vocabulary) or ids.max() >= 2**31:
        raise ValueError(f"Prompt {index} has token ids outside the model's vocabulary of {vocabulary}.")
    if len(misplaced := np.intersect1d(words, list(placeholders))):
        raise ValueError(
            f"Prompt {index} holds token {misplaced[0]}, which stands for a picture and is no text; put the ids of a "
            "picture's rows in its place (media.expand) and pass the picture, or leave it out."
        )
    return ids.astype(np.int32)


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """Raise ValueError if the parameters name tokens that the model does not have."""
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        if any(token >= vocabulary for token in getattr(params, name) or ()):
            raise ValueError(f"SamplingParams.{name} names tokens outside the model's vocabulary of {vocabulary}.")


def media_of(index: int, ids: Array, pictures: Sequence[Picture]) -> PromptMedia | None:
    """Return the media of prompt ``index``.

    Raises:
        ValueError: its token ids do not hold the rows of ``pictures``.
    """
    if not len(pictures):
        return None
    try:
        media = PromptMedia.of(ids, pictures)
    except ValueError as error:
        raise ValueError(f"Prompt {index}: {error}") from error
    shown = set() if media is None else {picture.digest for picture in media.pictures}
    if missing := sum(picture.digest not in shown for picture in pictures):
        raise ValueError(
            f"Prompt {index} does not hold the rows of {missing} of its {len(pictures)} pictures; put their ids in "
            "place of the placeholders (media.expand)."
        )
    return media


def signed(seed: int) -> int:
    """Return the seed modulo 2**64, as an int64."""
    return (int(seed) + 2**63) % 2**64 - 2**63
