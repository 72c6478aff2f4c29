"""Sandbox: untrusted Python, run where it can do no harm, with an answer in bounded time. Linux.

Each program has a process of its own with limits of processor and wall time, memory, processes, output and files; no
network, no environment, no file descriptors but its own, no files but the standard library (read-only) and an empty
directory that is gone afterwards. What keeps it there is in `jail.py`, and which of it the kernel grants is said by
`Sandbox.containment`.

Imports nothing of rolltree: the verifiers' processes (`engine/rewards/worker.py`) load it by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
LENGTH = struct.Struct("!Q")
START_S, GRACE_S = 60.0, 30.0
"""Time for the jail to start, and to answer beyond a program's own."""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    """Of each of its processes, in whole seconds, rounded up."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all."""
    processes: int = 16
    """Threads count. Where the kernel refuses namespaces there is one process."""
    output_kb: int = 64
    """Each of standard output and error."""
    files_mb: int = 64
    """Largest file; with namespaces, all files."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**20:
                raise ValueError(f"the limit {name} of a sandbox must be a number above 0, and it is {value!r}")


@dataclass(frozen=True)
class Execution:
    """How a program ended."""

    status: str
    """``ok``; ``exited`` before its end, without an error; ``error``; ``syntax`` (it is no Python); ``killed`` by a
    signal; ``died``: the sandbox itself was lost; or the limit it passed: ``timeout``, ``memory``, ``processes``,
    ``output``."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


class Sandbox:
    """Runs programs one after the other; a context manager. One thread at a time.

    Args:
        limits: of a program, where `run` is given no others.
        namespaces: whether programs are to have namespaces of their own; None: if the kernel grants them.

    Attributes:
        containment: in words, what keeps programs in; it stays the same as long as the sandbox is used.
        namespaces: whether they have them.

    Raises:
        OSError: this system cannot contain a program.
    """

    def __init__(self, limits: Limits | None = None, *, namespaces: bool | None = None) -> None:
        self.limits, self.namespaces = limits or Limits(), namespaces
        self.containment = ""
        self._why_not = "namespaces were not asked for"
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def run(self, code: str, *, then: str = "", stdin: str = "", limits: Limits | None = None) -> Execution:
        """Run a program.

        Args:
            then: code to run behind it, in its scope; the program's own ``__name__`` is then not ``__main__``.
        """
        limits = limits or self.limits
        if self._process is None:
            self._start()
        request = {"code": code, "then": then, "stdin": stdin, "limits": asdict(limits)}
        try:
            self._send(request)
            found = self._receive(limits.wall_s + GRACE_S)
        except (OSError, ValueError):
            self.close()
            return Execution("died")
        return Execution(**found)

    def close(self) -> None:
        """End it and all it has started. It starts again when it is asked again."""
        if self._process is None:
            return
        self._control.close()  # it kills what runs, takes its files away, and ends
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        with contextlib.suppress(OSError):
            os.rmdir(self._root)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _start(self) -> None:
        if self.namespaces is not False:
            try:
                self._launch(namespaces=True)
                self.namespaces = True
                return
            except OSError as error:
                if self.namespaces:
                    raise
                self.namespaces, self._why_not = False, f"namespaces are not to be had: {error}"
        self._launch(namespaces=False)
        self.containment += f" ({self._why_not})"

    def _launch(self, *, namespaces: bool) -> None:
        self._root = tempfile.mkdtemp(prefix="rolltree-sandbox-")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(JAIL), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
        try:
            self._send({"namespaces": namespaces, "root": self._root, "files_mb": self.limits.files_mb})
            answer = self._receive(START_S)
            if "map" in answer:
                self._send({"mapped": _map_users(answer["map"])})
                answer = self._receive(START_S)
            if "ready" not in answer:
                raise OSError(answer["failed"])
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"{error or 'it ended'}") from error
        self.containment = answer["ready"]
        if namespaces:
            os.rmdir(self._root)  # its mount is the root of the jail by now

    def _send(self, message: Any) -> None:
        content = json.dumps(message).encode()
        self._control.settimeout(GRACE_S)
        self._control.sendall(LENGTH.pack(len(content)) + content)

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        content = b""
        for wanted in (LENGTH.size, None):
            size = LENGTH.unpack(content)[0] if wanted is None else wanted
            content = b""
            while len(content) < size:
                if not select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError("the jail does not answer")
                some = self._control.recv(min(1 << 20, size - len(content)))
                if not some:
                    raise OSError("the jail has ended")
                content += some
        return json.loads(content)


class Sandboxes:
    """Sandboxes for several threads, made when they are needed and used again.

    Args:
        most: programs that run at the same time; further callers wait.
    """

    def __init__(self, limits: Limits | None = None, most: int | None = None) -> None:
        self.limits = limits
        self._places = threading.Semaphore(most or max(4, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._namespaces: bool | None = None  # as the first one has them

    @contextmanager
    def lent(self) -> Iterator[Sandbox]:
        """One of them, for the caller alone.

        Raises:
            OSError: this system cannot contain a program.
        """
        with self._places:
            with self._lock:
                if not self._idle:  # one after the other, so that all of them contain alike
                    self._idle.append(Sandbox(self.limits, namespaces=self._namespaces))
                sandbox = self._idle.pop()
                self._namespaces = sandbox.namespaces
            try:
                yield sandbox
            finally:
                with self._lock:
                    self._idle.append(sandbox)


def _map_users(pid: int) -> bool:
    """Give a process in a user namespace its users; whether there is another one beside the first.

    Raises:
        OSError: the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        with contextlib.suppress(OSError):
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", "0 0 1\n1000 65534 1\n")
            return True
    with contextlib.suppress(FileNotFoundError):
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", f"0 {group} 1\n")
    _write(f"/proc/{pid}/uid_map", f"0 {user} 1\n")
    return False


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
