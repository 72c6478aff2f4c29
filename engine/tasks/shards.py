"""The files of a folder that are the shards of one table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..errors import UserError
from .files import READABLE, form_of

PARTS = {"train": "train", "test": "test", "eval": "test", "validation": "valid", "valid": "valid", "val": "valid",
         "dev": "valid"}  # fmt: skip
"""Words of file names that tell which part of a set a file has."""


def shards_of(names: Sequence[str], folder: str, key: str, otherwise: str = "") -> list[str]:
    """Return the shards among the files below ``folder``: all in it that can be read, other than hidden ones.

    Args:
        names: paths relative to the folder, separated by slashes.
        key: the configuration key that names the folder, for error messages.
        otherwise: a further remedy, for a folder without shards.

    Raises:
        UserError: there are none, some are in folders below, or they are parts of a set that do not belong together.
    """
    seen = [name for name in sorted(names) if form_of(name) and not any(p[0] == "." for p in name.split("/"))]
    shards = [name for name in seen if "/" not in name]
    deep = [f"{folder}/{PurePosixPath(name).parent}" for name in seen if "/" in name]
    if deep and shards:
        end = f"*{form_of(shards[0])}"
        raise UserError(
            f"The folder '{folder}' ({key}) has data in folders of its own too ('{deep[0]}'); give a pattern, "
            f"'{folder}/{end}' for its own files or '{folder}/**/{end}' for all."
        )
    if not shards:
        inner = f"name a folder in it, such as '{deep[0]}'" if deep else f"give a folder with {READABLE} files"
        raise UserError(f"The folder '{folder}' ({key}) holds no data itself; {inner}{otherwise}.")
    _check_one_part(shards, folder, key)
    return shards


def _check_one_part(shards: Sequence[str], folder: str, key: str) -> None:
    first_of: dict[str, tuple[str, str]] = {}  # of each part, the word and the name of the first file
    for name in shards:
        words = re.split(r"[^a-z]+", name.lower())
        if (word := next(filter(PARTS.get, words), None)) is not None:
            first_of.setdefault(PARTS[word], (word, name))
    if len(first_of) > 1:
        first_files = sorted(first_of.values(), key=lambda each: each[0] != "train")
        pattern = f"{folder}/*{first_files[0][0]}*{form_of(first_files[0][1])}*"
        raise UserError(
            f"The folder '{folder}' ({key}) holds several parts of a set ('{first_files[0][1]}', "
            f"'{first_files[1][1]}'); name the files of one with a pattern, such as '{pattern}'."
        )
