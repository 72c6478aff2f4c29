"""Rows whose values a checkpoint can hold: with open groups, it keeps the entries of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UserError
from ..settings import TrainConfig
from .archive import Archive, NotKeptError

READ = {"answer", "solution", "id", "seed", "env", "messages"}
"""Columns that rolltree's own verifiers and programs read, besides those that the configuration names."""


class Entries:
    """Makes the entries of a run's prompts fit for its checkpoints.

    A value that a checkpoint cannot hold is left out where no code of the user's is given the entry and none of
    rolltree's reads the column; anywhere else it is an error.
    """

    def __init__(self, config: TrainConfig) -> None:
        data = config.data
        self._all = _user_code_reads(config) or bool(data.tasks) or data.source == "verifiers"
        self._read = READ | {data.prompt_key, data.answer_key, data.n_key or data.answer_key}

    def kept(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return ``row``, without columns that nobody reads and no checkpoint can hold.

        Args:
            where: what has the row, for error messages: "Row 3 of 'problems.parquet'".

        Raises:
            UserError: a column that may be read cannot be held.
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


def kept_entries(
    config: TrainConfig, *, recorded: bool = False
) -> Callable[[Mapping[str, Any], str], dict[str, Any]] | None:
    """Return `Entries.kept` of a run's prompts; None where nothing keeps their entries.

    Args:
        recorded: the groups are written to a file.
    """
    return Entries(config).kept if config.loop.staleness > 0 or recorded else None


def _user_code_reads(config: TrainConfig) -> bool:
    """Return whether a function or class of the user's is given entries; ``file.py:name`` names one."""
    named: list[Any] = [config.reward.verifier, config.rollout.program, *config.data.tools]
    named += [*config.reward.options.values(), *config.rollout.program_options.values()]
    return any(isinstance(name, str) and ":" in name for name in named)
