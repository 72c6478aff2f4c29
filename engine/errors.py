"""The two kinds of failure that a command reports in one sentence; any other exception is a bug.

Each message is one sentence that names the thing (file, key, directory) and the remedy.
"""

from __future__ import annotations


class UserError(Exception):
    """The request cannot be carried out: configuration, files or arguments. Exit code 2; nothing was overwritten."""

    exit_code = 2


class BadRowError(UserError):
    """A row of the data cannot be used; `data.on_bad_row` says what becomes of it."""


class RunError(Exception):
    """The run itself failed: memory, disk, a failing verifier, too many bad steps. Exit code 1."""

    exit_code = 1
