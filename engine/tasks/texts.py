"""Rows that are texts in a file: JSON lines, a JSON array, or csv. Where each begins is found once; a row is parsed
when it is asked for."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadRowError, UserError
from .sequences import Row, Rows
from .stored import BLOCK, Stored

Starts = npt.NDArray[np.int64]
MARK = "\ufeff"
"""The byte order mark, with which a file may begin, and each line of files that were joined."""
BLANK = re.compile(r"[ \t\n\r]*")
LINE_FEED, BRACE = 10, ord("{")
SMALL = 1 << 26
"""Bytes of a file up to which an error message tells whether it is one JSON object."""


class Texts(Rows):
    """Rows that are texts.

    Args:
        starts: [rows + 1] int64, the first byte of each row and the end of the last one.
        parse: returns the row of its number and its bytes, or raises `BadRowError`.
    """

    def __init__(self, stored: Stored, starts: Starts, parse: Callable[[int, bytes], Row]) -> None:
        self._stored, self._starts, self._parse = stored, starts, parse

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, number: int) -> Row:
        begin, end = self._starts[number : number + 2].tolist()
        return self._parse(number, self._stored.read(begin, end))

    def scan(self) -> Iterator[Row | BadRowError]:
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self._starts, self._starts[first] + BLOCK, "right")) - 1
            last = max(first + 1, last)
            begin, *ends = self._starts[first : last + 1].tolist()
            raw, at = self._stored.read(begin, ends[-1]), 0
            for number, end in enumerate(ends, first):
                try:
                    yield self._parse(number, raw[at : end - begin])
                except BadRowError as error:
                    yield error
                at = end - begin
            first = last

    def digest(self) -> bytes:
        return self._stored.digest()


def read_json(stored: Stored, shown: str, key: str) -> Texts:
    """Return the rows of a JSON array of objects, or of JSON lines, which never begin with a bracket.

    Raises:
        UserError: an array is none of objects, or is not JSON.
    """
    begin = ""
    with suppress(UnicodeDecodeError):  # the row tells where
        begin = _Window(stored).peek()
    if begin != "[":
        return read_lines(stored, shown, key)

    def row(number: int, raw: bytes) -> Row:
        entry: Row = json.JSONDecoder().raw_decode(raw.decode())[0]
        return entry

    return Texts(stored, _array(stored, f"'{shown}' ({key})"), row)


def read_lines(stored: Stored, shown: str, key: str) -> Texts:
    """Return the rows of JSON lines."""
    starts = _lines(stored)

    def row(number: int, raw: bytes) -> Row:
        try:
            entry = json.loads(_text(raw.partition(b"\n")[0]))
        except (ValueError, RecursionError) as error:
            if number == 0 and stored.size <= SMALL and _is_object(stored.read(0, stored.size)):
                raise BadRowError(
                    f"'{shown}' ({key}) is one JSON object over several lines; give an array of objects in a .json "
                    "file, or one object a line."
                ) from error
            where = f"Line {_line(stored, int(starts[number]))} of '{shown}' ({key})"
            if isinstance(error, UnicodeDecodeError):
                raise BadRowError(f"{where} is not in UTF-8: {error}; save it in UTF-8.") from error
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise BadRowError(f"{where} is not JSON: {why.rstrip('.')}.") from error
        if not isinstance(entry, dict):
            where = f"Line {_line(stored, int(starts[number]))} of '{shown}' ({key})"
            raise BadRowError(f"{where} is not a JSON object; give one object a line.")
        return entry

    return Texts(stored, starts, row)


def _text(line: bytes) -> str:
    return line.decode("utf-8-sig").removeprefix(MARK)


def _is_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(_text(raw)), dict)
    except (ValueError, RecursionError):
        return False


def _line(stored: Stored, begin: int) -> int:
    """Return the number of the line that begins at a byte; only ``\\n`` ends a line."""
    return 1 + sum(block.count(b"\n") for block in stored.blocks(begin))


def _lines(stored: Stored) -> Starts:
    """Return where the lines that are not blank begin, and the end of the file."""
    parts, begin = [np.empty(0, np.int64)], 0
    for piece in stored.pieces():
        view = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(view == LINE_FEED)
        if not piece.endswith(b"\n"):
            ends = np.append(ends, len(piece))
        starts = np.concatenate([[0], ends[:-1] + 1])
        odd = np.flatnonzero(view[starts] != BRACE)  # few
        blank = [i for i in odd.tolist() if not _shown(piece[starts[i] : ends[i]]).strip()]
        parts.append(np.delete(starts, blank) + begin)
        begin += len(piece)
    return np.concatenate([*parts, [stored.size]])


def _shown(line: bytes) -> str:
    return line.decode("utf-8-sig", "replace").removeprefix(MARK)


class _Window:
    """A part of a text, which grows and moves on.

    Attributes:
        text, at: the part, and the place in it.
        byte: the place in the file.
    """

    def __init__(self, stored: Stored) -> None:
        self._blocks, self._decoder = stored.blocks(), codecs.getincrementaldecoder("utf-8")()
        self._ended = False
        self.text, self.at, self.byte = "", 0, 0
        if self.peek() == MARK:
            self.skip(1)

    def grow(self) -> bool:
        """Read about as much again as is left of the part; return False if the text has ended.

        Raises:
            UnicodeDecodeError: it is not in UTF-8.
        """
        pieces, missing = [self.text[self.at :]], max(1, len(self.text) - self.at)
        while missing > 0 and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            pieces.append(self._decoder.decode(block, final=self._ended))
            missing -= len(pieces[-1])
        self.text, self.at = "".join(pieces), 0
        return any(pieces[1:])

    def peek(self) -> str:
        """Move to the next character that is not blank and return it; empty at the end of the text."""
        while True:
            blank = BLANK.match(self.text, self.at)
            assert blank is not None
            self.skip(blank.end() - self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def skip(self, count: int) -> None:
        """Move on by characters."""
        passed = self.text[self.at : self.at + count]
        self.byte += len(passed) if passed.isascii() else len(passed.encode())
        self.at += count

    def item(self) -> Any:
        """Return the JSON value that begins here, and move to its end.

        Raises:
            ValueError, RecursionError: there is none.
        """
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
                self.skip(end - self.at)
                return value
            except json.JSONDecodeError:  # perhaps it is cut off
                if len(self.text) - self.at > SMALL or not self.grow():
                    raise


def _array(stored: Stored, what: str) -> Starts:
    """Return where the items of a JSON array begin, and the end of the file."""
    starts, why = array("q"), ""
    try:
        window = _Window(stored)
        window.peek()
        window.skip(1)
        mark = window.peek()
        if mark == "]":
            window.skip(1)
        while mark != "]":
            starts.append(window.byte)
            if not isinstance(window.item(), dict):
                raise UserError(
                    f"Item {len(starts) - 1} of the array in {what} is not a JSON object; give an array of them."
                )
            mark = window.peek()
            if mark not in (",", "]"):
                why = f"Expecting ',' or ']' after item {len(starts) - 1}"
                break
            window.skip(1)
            window.peek()
        if not why and window.peek():
            why = "Expecting nothing after its end"
    except UnicodeDecodeError as error:
        raise UserError(f"The prompts file {what} is not in UTF-8: {error}; save it in UTF-8.") from error
    except json.JSONDecodeError as error:
        why = f"{error.msg} in item {len(starts) - 1}"
    except (ValueError, RecursionError) as error:
        why = f"{str(error).rstrip('.')} in item {len(starts) - 1}"
    if why:
        raise UserError(f"{what} is not a JSON array: {why}.")
    return np.append(np.frombuffer(starts, np.int64), stored.size)


def read_csv(stored: Stored, shown: str, key: str) -> Texts:
    """Return the rows below the header, the first line; every row needs all of its columns.

    Raises:
        UserError: it is not csv, or the header lacks the name of a column.
    """
    lines, starts, what = _CsvLines(stored), array("q"), f"'{shown}' ({key})"
    header: list[str] = []
    with _long_fields():
        reader = csv.reader(lines, strict=True)
        begin = 0
        try:
            for fields in reader:
                if fields and header:
                    starts.append(begin)
                header = header or fields
                begin = lines.byte
        except csv.Error as error:
            raise UserError(f"Line {reader.line_num} of {what} is not csv: {error}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"The prompts file {what} is not in UTF-8: {error}; save it in UTF-8.") from error
    if len(set(header)) < len(header) or not all(name.strip() for name in header):
        raise UserError(
            f"The first line of {what} names the columns, and one of them is empty or comes twice: "
            f"{', '.join(header)}; give each a name of its own."
        )

    def row(number: int, raw: bytes) -> Row:
        with _long_fields():
            text = io.StringIO(raw.decode(), newline="")
            fields = next(csv.reader(text, strict=True))
        if len(fields) != len(header):
            before = b"".join(stored.blocks(int(places[number]) + len(raw.rstrip(b"\r\n"))))
            line = 1 + before.replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n")
            raise BadRowError(
                f"The row that ends in line {line} of {what} has {len(fields)} fields and the first line names "
                f"{len(header)} columns; put texts with commas or line breaks in quotes."
            )
        return dict(zip(header, fields, strict=True))

    places = np.append(np.frombuffer(starts, np.int64), stored.size)
    return Texts(stored, places, row)


class _CsvLines:
    """The lines of a csv file, which ``\\r``, ``\\n`` or both end.

    Attributes:
        byte: the end of the line that was given last.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored, self.byte = stored, 0

    def __iter__(self) -> Iterator[str]:
        for piece in self._stored.pieces():
            text = piece.decode()
            for line in io.StringIO(text, newline=""):
                self.byte += len(line) if text.isascii() else len(line.encode())
                yield line if self.byte > len(line.encode()) else line.removeprefix(MARK)


@contextmanager
def _long_fields() -> Iterator[None]:
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than a long solution
    try:
        yield
    finally:
        csv.field_size_limit(limit)
