"""The files of rollouts in a run's directory: for each step one, or a folder with a part of each rank.

Both have the same name and rows, and what reads parquet reads both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..data.segment import Text
from ..data.store import read_texts, write_rollouts
from ..data.stored import whole
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
    if (file := _file(directory, step)).is_dir():  # of ranks that had trained this step before
        shutil.rmtree(file)
    write_rollouts(file, step, trees, texts)


@contextmanager
def step_folder(directory: Path, step: int) -> Iterator[Path]:
    """Yield an empty folder for `write_part`; after the block it has its place."""
    file = _file(directory, step)
    folder = file.with_name(file.name + ".parts")
    _remove(folder)
    folder.mkdir(parents=True)
    yield folder
    _remove(file)
    folder.replace(file)


def write_part(
    folder: Path, step: int, trees: Sequence[TokenTree], texts: Sequence[Sequence[str]], part: int, parts: int
) -> None:
    """Write a part of a step's rollouts; all parts, one after the other, are what `write_step` writes.

    Args:
        trees: those of the step, of which only the part's own are read to their tokens.
    """
    of_part = slice(len(trees) * part // parts, len(trees) * (part + 1) // parts)
    if members := [whole(tree) for tree in trees[of_part]]:
        write_rollouts(folder / f"part_{part:06d}.parquet", step, members, texts[of_part], trees)


def texts_of(directory: Path, step: int) -> list[Text]:
    """Return the texts of the responses of a step, shared ones once; none if it has no file."""
    file = _file(directory, step)
    return list(read_texts(file)) if file.exists() else []


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file(directory: Path, step: int) -> Path:
    return directory / "rollouts" / f"step_{step:06d}.parquet"
