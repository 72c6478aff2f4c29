"""The rows of one table as a sequence that reads each from disk when it is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

from ..errors import BadRowError

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """The rows of one file, or of one split of a set; nothing but the place of each is held.

    Iterating and indexing raise `BadRowError` at a row that cannot be read.
    """

    @abstractmethod
    def row(self, number: int) -> Row:
        """Return row ``number``, at least 0.

        Raises:
            BadRowError: it cannot be read.
        """

    @abstractmethod
    def scan(self) -> Iterator[Row | BadRowError]:
        """Yield all rows in order, in place of one that cannot be read the error."""

    @abstractmethod
    def digest(self) -> bytes:
        """Return a hash that other rows do not have."""

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | Sequence[Row]:
        if isinstance(number, slice):
            return [self.row(each) for each in range(len(self))[number]]
        return self.row(range(len(self))[number])

    def __iter__(self) -> Iterator[Row]:
        for row in self.scan():
            if isinstance(row, BadRowError):
                raise row
            yield row
