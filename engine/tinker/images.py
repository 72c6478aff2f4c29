"""Images in a client's model input: the rows that each takes have token ids of their own (`data.media`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.columns import Array
from ..data.media import Picture
from ..errors import UserError
from ..model.pictures import both_ways, family_of, not_touching
from ..model.processor import processor_beside
from .faults import FaultError

FORMATS = ("PNG", "JPEG")
MOST_PIXELS = 1 << 26
"""Most pixels of an image, before the model's processor makes it smaller."""


class Images:
    """Makes the pictures of a model.

    Args:
        tokenizer: the image processor lies beside it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model, tokenizer

    def read(self, where: str, content: bytes, expected: int | None) -> Picture:
        """Return the picture of an encoded file.

        Args:
            where: the file's place in the request.
            expected: the rows that the client expects; None for any number.

        Raises:
            FaultError: the model takes no images, or not this one.
        """
        try:
            family_of(self._model)
            processor = processor_beside(self._tokenizer)
        except (UserError, ValueError) as cannot:
            raise FaultError(f"{where} is an image. {cannot}") from None
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                wide, high = image.size
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
            raise FaultError(f"{where} is no image that can be read; give a PNG or JPEG file.") from None
        if wide * high > MOST_PIXELS:
            raise FaultError(f"{where} is an image of {wide} x {high} pixels, more than {MOST_PIXELS}; shrink it.")
        try:
            picture = processor.picture(content)
        except ValueError as wrong:
            raise FaultError(f"{where} is no image that the model takes: {wrong}.") from None
        if expected not in (None, picture.rows):
            raise FaultError(
                f"{where} has expected_tokens {expected}, and this image takes {picture.rows} rows of the model."
            )
        return picture

    def joined(self, where: str, parts: Sequence[Array | Picture]) -> tuple[Array, tuple[Picture, ...]]:
        """Return the ids ``[N]`` int32 of a model input, and its pictures.

        Raises:
            FaultError: two images follow one another in a model that cannot tell them apart.
        """
        parts = [part for part in parts if isinstance(part, Picture) or len(part)]
        shown = [isinstance(part, Picture) for part in parts]
        if any(shown) and both_ways(self._model) is not None:
            try:
                not_touching(self._model, any(map(all, pairwise(shown))))
            except ValueError as wrong:
                raise FaultError(f"{where}: {wrong}") from None
        ids = [np.asarray(part.ids if isinstance(part, Picture) else part, np.int32) for part in parts]
        return np.concatenate([*ids, np.zeros(0, np.int32)]), tuple(p for p in parts if isinstance(p, Picture))
