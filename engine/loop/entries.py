"""Rows whose values a checkpoint can hold: with open groups, it keeps the entries of their prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import UserError
from .archive import Archive, NotKeptError

READ = {"answer", "solution", "id", "seed", "env", "messages"}
"""Columns that rolltree's own verifiers and programs read, besides those that the configuration names."""


class Entries:
    """Makes the entries of a run's prompts fit for its checkpoints.

    A value that a checkpoint cannot hold is left out where no code of the user's is given the entry and none of
    rolltree's reads the column; anywhere else it is an error.

    Args:
        read: columns that the configuration names.
        all_read: code that may read any column is given the entries.
    """

    def __init__(self, read: Collection[str], *, all_read: bool) -> None:
        self._all, self._read = all_read, READ | set(read)

    def kept(self, row: Mapping[str, Any], where: str, *, plain: bool = False) -> dict[str, Any]:
        """Return ``row``, without columns that nobody reads and no checkpoint can hold.

        Args:
            where: what has the row, for error messages: "Row 3 of 'problems.parquet'".
            plain: arrays cannot be held either.

        Raises:
            UserError: a column that may be read cannot be held.
        """
        kept = {}
        for column, value in row.items():
            archive = Archive()
            try:
                archive.pack(value)
                if plain and archive.tensors:
                    raise NotKeptError("An array cannot be kept there; a list can.")
            except NotKeptError as error:
                if not self._all and column not in self._read:
                    continue
                raise UserError(
                    f"{where} has a value in column '{column}' that no checkpoint holds: {error} Convert the column to "
                    "text or numbers, or leave it out."
                ) from error
            kept[column] = value
        return kept
