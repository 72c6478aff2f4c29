"""The two kinds of failure that a command reports in one sentence, and those that come from other processes.

Any other exception is a bug. Each message is one sentence that names the thing (file, key, directory) and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """The request cannot be carried out: configuration, files or arguments. Exit code 2; nothing was overwritten."""

    exit_code = 2


class RefusedError(UserError, ValueError):
    """Keys, parts or models do not go together; the message is the first refusal and the number of the others.

    Args:
        refusals: a sentence for each two things, without its full stop.
        where: beginning of the message, such as the file.
    """

    def __init__(self, refusals: Sequence[str], where: str = "") -> None:
        more = len(refusals) - 1
        rest = f" ({more} more {'mistake' if more == 1 else 'mistakes'} after this one)" if more else ""
        super().__init__(f"{where}{refusals[0]}{rest}.")
        self.refusals = tuple(refusals)


class BadRowError(UserError):
    """A row of the data cannot be used; `data.on_bad_row` says what becomes of it."""


class RunError(Exception):
    """The run itself failed: memory, disk, a failing verifier, too many bad steps. Exit code 1."""

    exit_code = 1


class ElsewhereError(Exception):
    """Another process has failed, and not the code that waited for it: the user's functions let it pass."""
