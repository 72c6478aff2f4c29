"""Pictures in trees: each row that a picture takes in the decoder has a token id of its own.

The ids of a picture's rows follow from a hash of its content and lie above every vocabulary. Prefixes merge, keys are
reused and prompts compare by token ids alone, so two prompts of equal text and different pictures share nothing from
their first picture on, and the same picture is the same prefix in every process. The pixels are stored with the tree,
once a picture (`TokenTree.pictures`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .columns import Array

FIRST_ID = 2**30
"""Smallest token id of a picture's row; vocabularies are far smaller, and ids are int32."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture, as a model's vision tower takes it. Make one with :meth:`of`."""

    inputs: dict[str, Array]
    """Arguments of the model's ``get_image_features``; those of several pictures are concatenated in dimension 0."""
    rows: int
    """Rows that it takes in the decoder."""
    grid: tuple[int, int, int] | None
    """Frames, rows and columns of its grid of rotary positions (M-RoPE); None where the position is the depth."""
    digest: str
    """Hash of its content."""

    @staticmethod
    def of(inputs: Mapping[str, Array], rows: int, grid: tuple[int, int, int] | None = None) -> Picture:
        """Make a picture of ``rows`` rows from its ``inputs``, with the hash of their content.

        Raises:
            ValueError: it has no rows, or the grid has another number of places.
        """
        if rows < 1 or (grid is not None and int(np.prod(grid)) != rows):
            raise ValueError(
                f"A picture takes at least one row, one a place of its grid; got {rows} rows, grid {grid}."
            )
        content = hashlib.blake2b(repr((rows, grid)).encode(), digest_size=16)
        for name, values in sorted(inputs.items()):
            content.update(f"/{name} {values.dtype.str} {values.shape}/".encode())
            content.update(np.ascontiguousarray(values).tobytes())
        return Picture(dict(inputs), rows, grid, content.hexdigest())

    @property
    def first_id(self) -> int:
        """The token id of its first row; those of the others follow it."""
        return FIRST_ID + int(self.digest, 16) % (2**31 - FIRST_ID - self.rows)

    @property
    def ids(self) -> list[int]:
        """The token ids of its rows."""
        return list(range(self.first_id, self.first_id + self.rows))

    @property
    def places(self) -> Array:  # [3, rows] int64
        """The rotary positions of its rows, counted from its first one."""
        assert self.grid is not None
        return np.indices(self.grid).reshape(3, -1)

    @property
    def moved(self) -> int:
        """The number by which the rotary position of the text after it differs from its depth, because of it.

        Text goes on after the longest side of the grid (Wang et al. 2024, "Qwen2-VL", arXiv 2409.12191).
        """
        return 0 if self.grid is None else max(self.grid[1:]) - self.rows


def expand(ids: Sequence[int], pictures: Sequence[Picture], placeholder: int) -> list[int]:
    """Return ``ids`` with the ids of the pictures' rows in place of their placeholders.

    Args:
        ids: token ids of a prompt, with one ``placeholder`` a picture, or already one a row.
        pictures: in the order of their placeholders.

    Raises:
        ValueError: the number of placeholders is neither that of the pictures nor that of their rows, or those of one
            picture do not follow one another.
    """
    array = np.asarray(ids, np.int64)
    at = np.flatnonzero(array == placeholder)
    rows = sum(picture.rows for picture in pictures)
    if len(at) not in (len(pictures), rows):
        raise ValueError(
            f"The prompt has {len(at)} placeholders of pictures (token {placeholder}) for {len(pictures)} pictures of "
            f"{rows} rows together; give one a picture, or one a row."
        )
    parts, end, used = [], 0, 0
    for picture in pictures:
        taken = 1 if len(at) == len(pictures) else picture.rows
        begin = int(at[used])
        if int(at[used + taken - 1]) != begin + taken - 1:
            raise ValueError(
                f"The {taken} placeholders of a picture (token {placeholder}) do not follow one another; give each "
                "picture its own run of them."
            )
        parts += [array[end:begin].tolist(), picture.ids]
        end, used = begin + taken, used + taken
    return [token for part in (*parts, array[end:].tolist()) for token in part]


def distinct(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    """Return each picture once, in the order in which they come first.

    Raises:
        ValueError: two different pictures have the same ids, which happens by chance once in 2**30 pairs.
    """
    by_id: dict[int, Picture] = {}
    for picture in pictures:
        if by_id.setdefault(picture.first_id, picture).digest != picture.digest:
            raise ValueError(
                f"Two different pictures have the same token ids by chance ({picture.first_id}); leave one out."
            )
    return tuple(by_id.values())


def spans(ids: Array, position: Array, pictures: Sequence[Picture]) -> list[tuple[int, int, Picture]]:
    """Return begin, end and picture of each run of rows that a picture takes, in the order of rows.

    Args:
        ids: ``[T]`` token ids of rows in depth-first order.
        position: ``[T]`` depth of each.

    Raises:
        ValueError: rows hold ids of no picture given, or only a part of one, as after a branch inside of it.
    """
    by_id = {picture.first_id: picture for picture in distinct(pictures)}
    rows = np.flatnonzero(ids >= FIRST_ID)
    runs, at = [], 0
    while at < len(rows):
        begin = int(rows[at])
        picture = by_id.get(int(ids[begin]))
        if picture is None:
            raise ValueError(
                f"Token {int(ids[begin])} is a row of a picture that is not among the tree's; give all in `pictures`."
            )
        end, every = begin + picture.rows, np.arange(picture.rows)
        whole = np.array_equal(ids[begin:end], picture.first_id + every)
        if not whole or not np.array_equal(position[begin:end], position[begin] + every):
            raise ValueError("A picture's rows are not complete, or a branch lies inside of it; trees keep them whole.")
        runs.append((begin, end, picture))
        at += picture.rows
    return runs


def rotary_positions(
    runs: Sequence[tuple[int, int, Picture]], position: Array, subtree_end: Array
) -> Array | None:  # [3, T] int64
    """Return the rotary positions of rows in depth-first order; None if no picture has a grid.

    All rows below a picture are moved by the same number, and a picture's own rows lie on its grid.

    Args:
        runs: the result of `spans`.
        position: ``[T]`` depth of each row.
        subtree_end: ``[T]`` one past the last row below it.
    """
    if all(picture.grid is None for _, _, picture in runs):
        return None
    moved = np.zeros(len(position) + 1, np.int64)
    inside = np.zeros((3, len(position)), np.int64)
    for begin, end, picture in runs:
        inside[:, begin:end] = picture.places - np.arange(picture.rows)
        moved[end] += picture.moved
        moved[subtree_end[end - 1]] -= picture.moved
    return position + moved[:-1].cumsum() + inside


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The pictures of a prompt of ``P`` tokens, and the rotary positions along it."""

    spans: tuple[tuple[int, int, Picture], ...]
    """First row, end and picture of each run of rows that a picture takes."""
    rotary: Array | None  # [3, P] int64; None where they are the depth
    moved: int
    """The number by which the rotary position of text after the prompt differs from its depth."""

    @staticmethod
    def of(ids: Array, pictures: Sequence[Picture]) -> PromptMedia | None:
        """Return the media of a prompt; None if it holds no picture.

        Args:
            ids: ``[P]`` token ids, those of pictures in place of placeholders (`expand`).

        Raises:
            ValueError: as `spans`.
        """
        depth = np.arange(len(ids))
        runs = spans(ids, depth, pictures)
        if not runs:
            return None
        rotary = rotary_positions(runs, depth, np.full(len(ids), len(ids)))
        return PromptMedia(tuple(runs), rotary, sum(picture.moved for _, _, picture in runs))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Each picture once."""
        return distinct([picture for _, _, picture in self.spans])

    def rotary_of(self, begin: int, count: int) -> Array:  # [3, count] int64
        """Return the rotary positions of ``count`` rows from depth ``begin`` on, of the prompt or after it."""
        depth = np.arange(begin, begin + count)
        positions = np.repeat((depth + self.moved)[None], 3, axis=0)
        if self.rotary is not None and begin < (length := self.rotary.shape[1]):
            inside = min(count, length - begin)
            positions[:, :inside] = self.rotary[:, begin : begin + inside]
        return positions


@dataclass(frozen=True, eq=False)
class Media:
    """The pictures of a batch of ``T`` rows, of which they take ``P``; each distinct one is held once."""

    inputs: dict[str, Tensor]
    """Arguments of the model's ``get_image_features``, picture after picture."""
    sizes: tuple[int, ...]
    """Rows of each picture in the tower's output."""
    row: Tensor  # [P] int64, rows of the batch
    source: Tensor  # [P] int64, the row of the tower's output that goes there
    spans: tuple[tuple[int, int], ...]
    """First row and end of each run of the batch's rows that a picture takes."""
    rotary: Tensor | None  # [3, T] int64, rotary positions; None where they are the depth

    @staticmethod
    def of(
        ids: Array,  # [T]
        position: Array,  # [T]
        subtree_end: Array,  # [T]
        pictures: Sequence[Picture],
        device: torch.device | str | None = None,
    ) -> Media | None:
        """Return the media of rows in depth-first order; None if they hold no picture.

        Raises:
            ValueError: as `spans`, or the pictures were made for different models.
        """
        runs = spans(ids, position, pictures)
        if not runs:
            return None
        used = distinct([picture for _, _, picture in runs])
        kinds = {(*sorted(picture.inputs), picture.grid is None) for picture in used}
        if len(kinds) > 1:
            raise ValueError("Pictures of one batch were made for different models; make them with one processor.")
        first = dict(zip((p.first_id for p in used), np.cumsum([0, *(p.rows for p in used)]), strict=False))
        rotary = rotary_positions(runs, position, subtree_end)

        def tensor(values: Array) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        return Media(
            {
                name: torch.from_numpy(np.concatenate([picture.inputs[name] for picture in used])).to(device)
                for name in used[0].inputs
            },
            tuple(picture.rows for picture in used),
            tensor(np.concatenate([np.arange(begin, end) for begin, end, _ in runs])),
            tensor(np.concatenate([first[p.first_id] + np.arange(p.rows) for _, _, p in runs])),
            tuple((begin, end) for begin, end, _ in runs),
            None if rotary is None else tensor(rotary),
        )
