"""The two kinds of failure a command reports in one sentence; anything else is a bug.

Each message is one sentence that names the thing (file, key, directory) and the remedy.
"""

from __future__ import annotations


class UserError(Exception):
    """What was asked cannot be done as asked: configuration, files, arguments. Exit code 2, nothing was overwritten."""

    exit_code = 2


class RunError(Exception):
    """The run itself failed: memory, disk, a reward set to raise, too many bad steps. Exit code 1."""

    exit_code = 1
