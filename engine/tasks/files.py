"""Rows of one file: parquet, JSON lines or a JSON array, or csv; the texts may be compressed by gzip or zstd."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import UserError

Row = dict[str, Any]

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


def read_file(file: Path, shown: str, key: str) -> list[Row]:
    """Return all rows of ``file``, with the values that it has; those of csv are texts.

    Args:
        shown: the file as the user gave it, for error messages.
        key: the configuration key that names the file, for error messages.

    Raises:
        UserError: the file is unreadable, damaged, empty, or of another kind.
    """
    form = form_of(file.name)
    if form is None:
        raise UserError(f"The prompts file '{shown}' ({key}) is not {READABLE}; convert it to one of them.")
    if not file.is_file():  # a link to what is missing, or a pipe
        raise UserError(f"The prompts file '{shown}' ({key}) is no file or links to none; restore or remove it.")
    if form == ".parquet":
        rows = _parquet(file, shown, key)
    else:
        readers: dict[str, Callable[[str, str, str], list[Row]]] = {".json": _json, ".jsonl": _lines, ".csv": _csv}
        rows = readers[form](_text(file, shown, key), shown, key)
    if not rows:
        raise UserError(f"The prompts file '{shown}' ({key}) has no rows; remove it or give one that has some.")
    return rows


def _parquet(file: Path, shown: str, key: str) -> list[Row]:
    try:
        return pq.read_table(file, partitioning=None).to_pylist()
    except Exception as error:  # also for a value without a Python type
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"The prompts file '{shown}' ({key}) is not a readable parquet file: {why}.") from error


def _text(file: Path, shown: str, key: str) -> str:
    """Return a file's text, decompressed."""
    kind = file.suffix.lower()
    try:
        raw = file.read_bytes()
        if kind == ".gz":
            raw = gzip.decompress(raw)
        elif kind == ".zst":
            raw = pa.CompressedInputStream(pa.BufferReader(raw), "zstd").read()
    except (EOFError, OSError, zlib.error) as error:
        if kind in PACKED and not (isinstance(error, OSError) and error.errno):
            why = f"is damaged or cut off: {str(error).rstrip('.')}; fetch or write it again"
        else:
            why = f"cannot be read: {error}"
        raise UserError(f"The prompts file '{shown}' ({key}) {why}.") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"The prompts file '{shown}' ({key}) is not in UTF-8: {error}; save it in UTF-8.") from error


def _json(text: str, shown: str, key: str) -> list[Row]:
    """Return the rows of a JSON array of objects, or of JSON lines, which never begin with a bracket."""
    if not text.lstrip().startswith("["):
        return _lines(text, shown, key)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{shown}' ({key}) is not a JSON array: {str(error).rstrip('.')}.") from error
    wrong = next((n for n, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise UserError(f"Item {wrong} of the array in '{shown}' ({key}) is not a JSON object; give an array of them.")
    return rows


def _lines(text: str, shown: str, key: str) -> list[Row]:
    rows: list[Row] = []
    lines = text.split("\n")  # splitlines would cut at U+2028 inside a string too
    for number, line in enumerate((line.removeprefix("\ufeff") for line in lines), 1):  # of files that were joined
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not rows and _is_object(text):
                raise UserError(
                    f"'{shown}' ({key}) is one JSON object over several lines; give an array of objects in a .json "
                    "file, or one object a line."
                ) from error
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"Line {number} of '{shown}' ({key}) is not JSON: {why.rstrip('.')}.") from error
        if not isinstance(row, dict):
            raise UserError(f"Line {number} of '{shown}' ({key}) is not a JSON object; give one object a line.")
        rows.append(row)
    return rows


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _csv(text: str, shown: str, key: str) -> list[Row]:
    """Return the rows below the header, the first line; every row needs all of its columns."""
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than a long solution
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header: list[str] = next(filter(None, reader), [])
        if len(set(header)) < len(header) or not all(name.strip() for name in header):
            raise UserError(
                f"The first line of '{shown}' ({key}) names the columns, and one of them is empty or comes twice: "
                f"{', '.join(header)}; give each a name of its own."
            )
        rows = []
        for fields in reader:
            if not fields:  # an empty line
                continue
            if len(fields) != len(header):
                raise UserError(
                    f"The row that ends in line {reader.line_num} of '{shown}' ({key}) has {len(fields)} fields and "
                    f"the first line names {len(header)} columns; put texts with commas or line breaks in quotes."
                )
            rows.append(dict(zip(header, fields, strict=True)))
        return rows
    except csv.Error as error:
        raise UserError(f"Line {reader.line_num} of '{shown}' ({key}) is not csv: {error}.") from error
    finally:
        csv.field_size_limit(limit)
