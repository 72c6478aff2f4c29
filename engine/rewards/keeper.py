"""Starts a verifier process and kills everything that it started when it ends. Run as a script; Linux and macOS.

A verifier may start programs, fork, and detach them with ``setsid``; killing its process would leave those running. So
this process runs between the pool and the worker as a *subreaper*: any descendant that loses its parent becomes its
child. When the worker ends, or the pool closes the *lifeline* (a socket, which also closes when the pool's process ends
for any reason), it kills its children, generation by generation, until there are none.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 1.0
"""Seconds between checks that the parent still exists: a fork of the parent may keep a copy of the lifeline open."""
KILL_S = 5.0
"""Seconds after which processes that cannot be killed (another user's, or blocked on a disk) are left."""


def main(lifeline: int, connection: int) -> None:
    parent = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        os.close(lifeline)
        os.setsid()  # signals to the worker's group reach neither this process nor the run
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _work(connection)
        os._exit(0)
    os.close(connection)
    wake, ours = socket.socketpair()
    ours.setblocking(False)
    signal.set_wakeup_fd(ours.fileno())
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, so that the signal wakes the select below
    while os.getppid() == parent and not _ended(worker):
        ready, _, _ = select.select([lifeline, wake.fileno()], [], [], LOOK_S)
        if lifeline in ready or (wake.fileno() in ready and set(wake.recv(4096)) - {signal.SIGCHLD}):
            break
    _kill_all_below(worker)


def _work(connection: int) -> None:
    spec = importlib.util.spec_from_file_location("rolltree_worker", Path(__file__).with_name("worker.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(connection)


def _ended(worker: int) -> bool:
    """Reap ended children; return True if the worker has ended."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid in (0, worker):
            return pid == worker


def _kill_all_below(worker: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)  # all that can be done without /proc
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    children = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with (
            contextlib.suppress(OSError, IndexError),
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f,
        ):
            if int(f.read().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(name))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
