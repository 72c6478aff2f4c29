"""The directory of a run: it belongs to one process at a time, and no run overwrites another."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError

EPISODES = "episodes.json"
"""File that tells of agents' episodes under way; there is none after the end of the run."""
TAKEN_OVER = {".lock", "config.toml", "checkpoints", EPISODES, f".{EPISODES}.partial"}
"""Files of a run that ended before its first checkpoint; a new run may replace them."""


def holds_a_run(directory: Path) -> bool:
    """Return True if ``directory`` holds a checkpoint or any file other than those of a run that ended before its first
    checkpoint."""
    if not os.path.isdir(directory):  # False also for a name that is too long, or in a place that may not be read
        return False
    from ..train import checkpoint  # it imports torch, and the report reads files without that

    if checkpoint.latest(directory / "checkpoints") is not None:
        return True
    return any(path.name not in TAKEN_OVER for path in directory.iterdir())


def check_writable(directory: Path) -> None:
    """Check that ``directory``, or its nearest existing parent, can be written; nothing is created.

    Raises:
        UserError: ``directory`` cannot be made or written.
    """
    there = directory
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(
            f"The run directory '{directory}' cannot be made: '{there}' is no directory; choose another --output_dir."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"The run directory '{directory}' cannot be written: '{there}' allows no writing; choose another "
            "--output_dir."
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make the run's directory and lock it against other processes; the lock ends with the process.

    Raises:
        UserError: the directory cannot be made, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"The run directory '{directory}' cannot be made: {error.strerror}; choose another --output_dir."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing the run '{directory}'; wait for it, or choose another --name."
            ) from None
        yield


def check_directory(directory: Path) -> None:
    """Refuse a directory that cannot be written or that holds another run.

    Raises:
        UserError: the directory cannot be written or holds another run.
    """
    check_writable(directory)
    if holds_a_run(directory):
        raise UserError(
            f"'{directory}' already holds a run; continue it with --resume, or choose another --name or --output_dir."
        )
