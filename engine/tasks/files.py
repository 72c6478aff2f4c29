"""The forms of data files: parquet, JSON lines or a JSON array, or csv; the texts may be compressed by gzip or zstd."""

from __future__ import annotations

import gzip
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import UserError
from .parquet import read_parquet
from .sequences import Rows
from .stored import BLOCK, DataFile, Spool, Stored, Unpacked
from .texts import read_csv, read_json, read_lines

FORMS = (".parquet", ".jsonl", ".json", ".csv")
PACKED = (".gz", ".zst")
READABLE = ".parquet, .jsonl, .json or .csv (the last three also with .gz or .zst)"
"""The forms, for error messages."""
WILD = re.compile(r"[*?\[]")
"""A character that makes a path a pattern."""


def form_of(name: str) -> str | None:
    """Return the one of `FORMS` that a file has by its name; None for another kind of file."""
    end = Path(name.lower()).suffix
    if end in PACKED:
        inner = Path(name[: -len(end)].lower()).suffix
        return inner if inner in FORMS and inner != ".parquet" else None
    return end if end in FORMS else None


def stem_of(name: str) -> str:
    """Return a file's name without folder, form and compression."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix.lower() in PACKED else path.stem


def read_file(file: Path, shown: str, key: str, spool: Spool) -> Rows:
    """Return the rows of ``file``, with the values that it has; those of csv are texts.

    Args:
        shown: the file as the user gave it, for error messages.
        key: the configuration key that names the file, for error messages.
        spool: gets what is compressed.

    Raises:
        UserError: the file is unreadable, damaged, empty, or of another kind.
    """
    form = form_of(file.name)
    if form is None:
        raise UserError(f"The prompts file '{shown}' ({key}) is not {READABLE}; convert it to one of them.")
    if not file.is_file():  # a link to what is missing, or a pipe
        raise UserError(f"The prompts file '{shown}' ({key}) is no file or links to none; restore or remove it.")
    stored: Stored = DataFile(file, shown, key)
    if form == ".parquet":
        rows: Rows = read_parquet(stored, file, shown, key, spool)
    else:
        if file.suffix.lower() in PACKED:
            stored = _unpacked(file, shown, key, spool)
        read = {".json": read_json, ".jsonl": read_lines, ".csv": read_csv}[form]
        rows = read(stored, shown, key)
    if not len(rows):
        raise UserError(f"The prompts file '{shown}' ({key}) has no rows; remove it or give one that has some.")
    return rows


def _unpacked(file: Path, shown: str, key: str, spool: Spool) -> Stored:
    """Decompress a file into a spool."""
    begin = spool.size
    try:
        packed: Any = gzip.open if file.suffix.lower() == ".gz" else partial(pa.input_stream, compression="zstd")
        with packed(file) as opened:
            while block := opened.read(BLOCK):
                spool.write(block)
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            why = f"cannot be read: {error}"
        else:
            why = f"is damaged or cut off: {str(error).rstrip('.')}; fetch or write it again"
        raise UserError(f"The prompts file '{shown}' ({key}) {why}.") from error
    return Unpacked(spool, begin)
