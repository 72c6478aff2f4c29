"""The containers of a process: a folder that it holds, their label, and a reaper that removes them after it.

The label names the machine and the folder. A process holds a lock in its folder, which the kernel frees when it is
gone, so that the reaper, and any later process on the machine, can tell whose containers are left over.

``python owned.py FOLDER LABEL ENGINE...`` is the reaper: it waits for the end of its standard input, then removes the
containers with the label, and the folder. It loads this file alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LABEL = "rolltree.owner"
LOCK = "lock"
QUIET = 8
"""Looks in a row at which the reaper must find no container: one may just be about to start."""
LOOK_S = 0.25
MOST_S = 120.0
"""Seconds after which the reaper gives up, where the engine does not remove a container."""


class Owned:
    """The folder of a process's containers, and their reaper.

    Args:
        engine: the words of the engine's command line.

    Attributes:
        folder: files of the containers may be here, in folders of their own.
        label: value of `LABEL`.
    """

    def __init__(self, engine: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rolltree-containers-"))
        self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.label = f"{socket.gethostname()}:{self.folder}"
        self._reaper = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(self.folder), self.label, *engine], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """Let the reaper remove what is left, and wait for it."""
        os.close(self._lock)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(b".")  # no container is about to start
        self._reaper.stdin.close()
        self._reaper.wait(MOST_S)


def orphans(engine: Sequence[str]) -> list[str]:
    """Return the containers of processes of this machine that are gone, and remove the folders of these.

    Args:
        engine: the words of the engine's command line.
    """
    names = _said(engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}").split()
    left = []
    for name in names:
        label = _said(engine, "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', name).strip()
        host, _, folder = label.partition(":")
        if host == socket.gethostname() and folder and not _held(Path(folder)):
            left.append(name)
            remove_folder(folder, engine)
    return left


def remove_folder(folder: str, engine: Sequence[str]) -> None:
    """Remove a folder with files that users of containers have written, which may be other users' on this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder) and os.path.basename(engine[0]).startswith("podman"):
        _said(engine, "unshare", "rm", "-rf", folder)


def _held(folder: Path) -> bool:
    """Return whether the process of a folder holds it."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _said(engine: Sequence[str], *words: str) -> str:
    with suppress(OSError):
        return subprocess.run(
            [*engine, *words], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        ).stdout
    return ""


def main(folder: str, label: str, *engine: str) -> None:
    """Wait for the end of the process whose containers these are, and remove them."""
    in_order = bool(sys.stdin.buffer.read())
    quiet, end = 0, time.monotonic() + MOST_S
    while quiet < (1 if in_order else QUIET) and time.monotonic() < end:
        names = _said(engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}={label}").split()
        quiet = 0 if names else quiet + 1
        if names:
            _said(engine, "rm", "--force", "--volumes", *names)
        elif not in_order:
            time.sleep(LOOK_S)
    remove_folder(folder, engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
