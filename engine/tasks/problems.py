"""The problems of a place such as `data.path`: a row is read and made into a problem when it is asked for."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np

from ..errors import BadRowError
from ..settings import Place
from .images import digest_of
from .problem import Problem
from .rows import VERL, find_answer
from .sequences import Row
from .tables import Table, read_tables

SAMPLE = 1024
"""Rows that are tried at the start; all if there are no more."""


@dataclass(frozen=True)
class Read:
    """The problems of a place."""

    rows: Problems
    said: str
    """Number of rows, and where they are."""


class Problems(Sequence[Problem]):
    """The problems of several tables, one after another.

    Iterating and indexing raise `BadRowError` at a row that is no problem.
    """

    def __init__(self, tables: Sequence[Table], prompt_key: str, answer_key: str, image_key: str | None) -> None:
        self._tables, self._keys = tables, (prompt_key, answer_key, image_key)
        self._ends = list(accumulate(len(table.rows) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, number: int) -> Problem: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Problem]: ...
    def __getitem__(self, number: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        number = range(len(self))[number]
        index = bisect_right(self._ends, number)
        table = self._tables[index]
        inside = number - (self._ends[index] - len(table.rows))
        return table.problem(inside, table.rows.row(inside), *self._keys)

    def __iter__(self) -> Iterator[Problem]:
        for number, table, row in self.rows():
            yield self.made(number, table, row)

    def rows(self) -> Iterator[tuple[int, Table, Row | BadRowError]]:
        """Yield the number in its table, the table and the values of each row, in order; an error in place of one that
        cannot be read."""
        for table in self._tables:
            for number, row in enumerate(table.rows.scan()):
                yield number, table, row

    def made(self, number: int, table: Table, row: Row | BadRowError) -> Problem:
        """Return the problem of what `rows` yields.

        Raises:
            BadRowError: it is none.
        """
        if isinstance(row, BadRowError):
            raise row
        return table.problem(number, row, *self._keys)

    def digest(self, *, pictures: bool) -> bytes:
        """Return a hash that other rows, or rows of files with other names, do not have.

        Args:
            pictures: the files that rows name are part of it.
        """
        digest = hashlib.blake2b(digest_size=16)
        for table in self._tables:
            digest.update(f"{table.name}\0{len(table.rows)}\0".encode("utf-8", "surrogatepass") + table.rows.digest())
        for number, table, row in self.rows() if pictures else ():
            with suppress(BadRowError):
                digest.update(digest_of(self.made(number, table, row).images).encode() + b"/")
        return digest.digest()


def spread(count: int) -> list[int]:
    """Return the numbers of at most `SAMPLE` rows of ``count``, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(np.int64)).tolist()


def read_problems(
    place: Place, prompt_key: str, answer_key: str, image_key: str | None = None, *, skip: bool = False
) -> Read:
    """Return the rows of ``place`` as problems, in the order of the files' names; their entries keep all columns.

    Args:
        prompt_key, answer_key: columns of the prompt and of the reference answer.
        image_key: column of the pictures, if there is one; their paths are relative to the folder of the row's file.
        skip: rows that are no problems are left to the caller.

    Raises:
        UserError: the place does not exist, cannot be read, is empty or of another kind.
        BadRowError: without ``skip``, one of the rows that are tried, `SAMPLE`, lacks a column or is no problem.
    """
    tables = read_tables(place)
    rows = Problems(tables, prompt_key, answer_key, image_key)
    for number in [] if skip else spread(len(rows)):
        rows[number]
    try:
        first = find_answer(tables[0].rows[0], answer_key)
    except BadRowError:
        first = None
    verl = f", answers in '{VERL}'" if first is not None and first[0] == VERL and answer_key == "answer" else ""
    files = f" ({len(tables)} files)" if len(tables) > 1 else ""
    return Read(rows, f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} of {place}{files}{verl}")
