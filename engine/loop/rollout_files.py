"""The files of rollouts in a run's directory, one for each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.segment import Text
from ..data.store import read_texts, write_rollouts
from ..tasks.images import thumbnail
from .buffer import Group

THUMBNAILS = 4
"""The pictures of the first prompts of a step are written too; the report shows no more."""


def write_step(directory: Path, step: int, batch: Sequence[Group]) -> None:
    """Write the rollouts of a step, with thumbnails of the pictures of its first prompts."""
    for group in batch[:THUMBNAILS]:
        if group.prompt.images:
            group.tree.meta["thumbnails"] = [thumbnail(image) for image in group.prompt.images]
    write_rollouts(_file(directory, step), step, [group.tree for group in batch], [group.texts for group in batch])


def texts_of(directory: Path, step: int) -> list[Text]:
    """Return the texts of the responses of a step, shared ones once; none if it has no file."""
    file = _file(directory, step)
    return list(read_texts(file)) if file.exists() else []


def _file(directory: Path, step: int) -> Path:
    return directory / "rollouts" / f"step_{step:06d}.parquet"
