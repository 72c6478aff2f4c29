"""Runs a command, and ends all that it has started when the process that wanted it is gone, killed or not.

``python watched.py PID COMMAND...`` runs COMMAND with its own standard streams, as a child of a watcher. When COMMAND
ends, when process PID is no longer the watcher's parent, or at SIGTERM, the watcher ends COMMAND and every process that
came from it, also those that left its session: on Linux they become the watcher's children when their parents end.

Imports nothing of rolltree: a watcher loads this file alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.25
"""Seconds between two looks at the parent."""
GRACE_S = 1.0
"""Seconds in which the command may end by itself after SIGTERM."""
SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux: orphans below this process become its children."""
NOTICED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def watched(command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` until this process is gone."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> int:
    """Run ``command`` until it ends or ``parent`` is gone, and return its exit status as a shell tells it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICED)
    child = os.fork()
    if child == 0:
        _become(command)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # so that a pipe ends with the command
        os.dup2(null, stream)
    status = None
    while status is None and os.getppid() == parent:
        noticed = signal.sigtimedwait(NOTICED, LOOK_S)
        if noticed is not None and noticed.si_signo != signal.SIGCHLD:
            break
        status = _reap(child)
    if status is None:
        with suppress(OSError):
            os.kill(child, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while (status := _reap(child)) is None and time.monotonic() < end:
            time.sleep(0.01)
    _end_rest(child)
    code = os.waitstatus_to_exitcode(signal.SIGKILL if status is None else status)
    return code if code >= 0 else 128 - code


def _become(command: list[str]) -> None:
    """Run the command in place of this process, in a process group of its own."""
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICED)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reap(child: int) -> int | None:
    """Collect what has ended; return the wait status of ``child`` if that is among it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return ended[1]
    return None


def _end_rest(group: int) -> None:
    """Kill the process group and all children, among them orphans, until there is none."""
    for _ in range(500):
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        for pid in _children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the processes whose parent is this one, where ``/proc`` tells."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
