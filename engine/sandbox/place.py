"""Gives a command a directory whose path is the same in every run of it, `PLACE`, by the script `mounted`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .sandbox import taken_away

PLACE = "/episode"
SCRIPT = Path(__file__).with_name("mounted.py")


def at_place(folder: Path, hidden: Path, words: Sequence[str]) -> list[str]:
    """Return the words of a command that runs ``words`` in the directory ``PLACE/work``.

    Args:
        folder: holds the directories ``root``, which is empty, and ``episode``: what is to be at `PLACE`, with a
            directory ``work``.
        hidden: an existing directory that the command finds empty.
        words: the command's.
    """
    return [sys.executable, "-I", "-S", "-B", str(SCRIPT), str(folder), str(hidden), PLACE, *words]


def no_place() -> str:
    """Return why this system gives no command a directory at `PLACE`; empty if it does.

    Raises:
        ValueError: ROLLTREE_SANDBOX_WITHOUT names a feature that there is not.
    """
    if "namespaces" in taken_away():
        return "ROLLTREE_SANDBOX_WITHOUT takes namespaces away"
    if sys.platform != "linux":
        return "namespaces of mounts are Linux's"
    with tempfile.TemporaryDirectory(prefix="rolltree-agents-") as hidden:
        folder = Path(hidden) / "probe"
        for name in ("root", "episode/work"):
            (folder / name).mkdir(parents=True)
        words = at_place(folder, Path(hidden), ["true"])
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
