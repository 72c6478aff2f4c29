"""The files of rollouts in a run's directory, one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.segment import Text
from ..data.store import read_texts, write_rollouts
from ..data.tree import TokenTree
from ..tasks.images import Image, thumbnail

THUMBNAILS = 4
"""The pictures of the first prompts of a step are written too; the report shows no more."""


def write_step(
    directory: Path,
    step: int,
    trees: Sequence[TokenTree],
    texts: Sequence[Sequence[str]],
    images: Sequence[Sequence[Image]],
) -> None:
    """Write the rollouts of a step, with thumbnails of the pictures of its first prompts.

    Args:
        texts: of the responses of each tree, in the order of its leaves.
        images: the pictures of each tree's prompt.
    """
    for tree, pictures in zip(trees[:THUMBNAILS], images, strict=False):
        if pictures:
            tree.meta["thumbnails"] = [thumbnail(image) for image in pictures]
    write_rollouts(_file(directory, step), step, trees, texts)


def texts_of(directory: Path, step: int) -> list[Text]:
    """Return the texts of the responses of a step, shared ones once; none if it has no file."""
    file = _file(directory, step)
    return list(read_texts(file)) if file.exists() else []


def _file(directory: Path, step: int) -> Path:
    return directory / "rollouts" / f"step_{step:06d}.parquet"
