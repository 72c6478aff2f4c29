"""Reduces rows of data to values that a checkpoint can store with the prompts of open groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import UserError
from .archive import Archive, NotKeptError

READ = {"answer", "solution", "id", "seed", "env", "messages", "task"}
"""Columns that rolltree's own verifiers and programs read, in addition to those that the configuration names."""


class Entries:
    """Prepares the entries of a run's prompts for its checkpoints.

    A value that a checkpoint cannot store is left out if no code of the user gets the entry and no code of rolltree
    reads the column; otherwise it is an error.

    Args:
        read: columns that the configuration names.
        all_read: True if code that may read any column gets the entries.
    """

    def __init__(self, read: Collection[str], *, all_read: bool) -> None:
        self._all, self._read = all_read, READ | set(read)

    def kept(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return ``row`` without columns that are never read and that a checkpoint cannot store.

        Args:
            where: description of the row for error messages: "Row 3 of 'problems.parquet'".

        Raises:
            UserError: a column that may be read cannot be stored.
        """
        kept = {}
        for column, value in row.items():
            try:
                Archive().pack(value)
            except NotKeptError as error:
                if not self._all and column not in self._read:
                    continue
                raise UserError(
                    f"{where} has a value in column '{column}' that no checkpoint holds: {error} Convert the column to "
                    "text or numbers, or leave it out."
                ) from error
            kept[column] = value
        return kept
