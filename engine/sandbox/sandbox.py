"""Sandbox: runs untrusted Python contained and with an answer in bounded time. Linux only.

Each program runs in a new process with limits on processor and wall time, memory, processes, output and files. It has
no network, no environment, no file descriptors except its own, and no files except the standard library (read-only)
and an empty directory that is deleted afterwards. `jail.py` implements this; `Sandbox.containment` describes which of
it the kernel grants.

Imports nothing of rolltree: the verifiers' processes (`engine/rewards/worker.py`) load this file alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
LENGTH = struct.Struct("!Q")
FEATURES = ("namespaces", "landlock")
"""Features that not every kernel has; ``ROLLTREE_SANDBOX_WITHOUT`` takes some away, names with commas."""
START_S, GRACE_S = 60.0, 30.0
"""Seconds that the jail may take to start, and to answer after a program's own time limit."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program.

    Raises:
        ValueError: a limit is not a number above 0.
    """

    wall_s: float = 5.0
    cpu_s: float = 5.0
    """Processor time of each process, rounded up to whole seconds."""
    memory_mb: int = 512
    """Limit on the address space of each process, and on the resident memory of all together."""
    processes: int = 16
    """Number of processes and threads; if the kernel refuses namespaces, only one process is possible."""
    output_kb: int = 64
    """Limit on standard output and on standard error, each."""
    files_mb: int = 64
    """Size of the largest file; with namespaces, of all files together."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**20:
                raise ValueError(f"the limit {name} of a sandbox must be a number above 0, and it is {value!r}")


@dataclass(frozen=True)
class Execution:
    """The outcome of a program."""

    status: str
    """``ok``; ``exited`` before its end without an error; ``error``; ``syntax`` (invalid Python); ``killed`` by a
    signal; ``died``: the sandbox itself ended; or the limit that was exceeded: ``timeout``, ``memory``, ``processes``,
    ``output``."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0


class Sandbox:
    """Runs programs one after the other; a context manager. Only one thread may use it at a time.

    Args:
        limits: default limits of a program.
        namespaces: require (True) or forego (False) namespaces for programs; None: use them if the kernel grants them.
        packages: installed packages that programs may import besides the standard library; they need namespaces.

    Attributes:
        containment: description of how programs are contained; it does not change while the sandbox is used.
        namespaces: True if programs run in namespaces.

    Raises:
        OSError: this system cannot contain a program.
        ValueError: a package is not installed, or the kernel grants no namespaces for it.
    """

    def __init__(
        self, limits: Limits | None = None, *, namespaces: bool | None = None, packages: Sequence[str] = ()
    ) -> None:
        self.limits, self.namespaces = limits or Limits(), namespaces
        self._folders = [folder for name in packages for folder in package_folders(name)]
        self.containment = ""
        self._why_not = "namespaces were not requested"
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def run(self, code: str, *, then: str = "", stdin: str = "", limits: Limits | None = None) -> Execution:
        """Run a program and return its outcome; a program's failure is a status, never an exception.

        Args:
            code: the program.
            then: code to run after it, in its scope, such as tests; the program's ``__name__`` is then ``solution``,
                else ``__main__``.
            stdin: text of its standard input.
            limits: limits of this program; default: the sandbox's.
        """
        limits = limits or self.limits
        if self._process is None:
            self._start()
        request = {"code": code, "then": then, "stdin": stdin, "limits": asdict(limits)}
        try:
            self._send(request)
            answer = self._receive(limits.wall_s + GRACE_S)
        except (OSError, ValueError):
            self.close()
            return Execution("died")
        return Execution(**answer)

    def close(self) -> None:
        """End the jail and everything it has started; the next `run` starts a new one."""
        if self._process is None:
            return
        self._control.close()  # the jail then kills the running program, deletes its files, and ends
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
                if self._folders:
                    raise ValueError(
                        f"packages in the sandbox need namespaces, which are not available: {error}; leave the option "
                        "'packages' out"
                    ) from error
                self.namespaces, self._why_not = False, f"namespaces are not available: {error}"
        self._launch(namespaces=False)
        self.containment += f" ({self._why_not})"

    def _launch(self, *, namespaces: bool) -> None:
        missing = taken_away()
        if namespaces and "namespaces" in missing:
            raise OSError("ROLLTREE_SANDBOX_WITHOUT takes them away")
        self._root = tempfile.mkdtemp(prefix="rolltree-sandbox-")
        self._control, jail_end = socket.socketpair()
        with jail_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(JAIL), str(jail_end.fileno())],
                pass_fds=[jail_end.fileno()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the run only
            )
        try:
            setup = {"namespaces": namespaces, "root": self._root, "files_mb": self.limits.files_mb}
            self._send(setup | {"packages": self._folders, "landlock": "landlock" not in missing})
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
            os.rmdir(self._root)  # the jail has mounted its own root by now

    def _send(self, message: Any) -> None:
        content = json.dumps(message).encode()
        self._control.settimeout(GRACE_S)
        self._control.sendall(LENGTH.pack(len(content)) + content)

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        content = b""
        for fixed_size in (LENGTH.size, None):
            size = LENGTH.unpack(content)[0] if fixed_size is None else fixed_size
            content = b""
            while len(content) < size:
                if not select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError("the jail does not answer")
                chunk = self._control.recv(min(1 << 20, size - len(content)))
                if not chunk:
                    raise OSError("the jail has ended")
                content += chunk
        return json.loads(content)


class Sandboxes:
    """A pool of sandboxes for several threads; each is made when first needed and then reused.

    Args:
        limits: default limits of a program.
        most: largest number of programs that run at the same time; further callers wait.
    """

    def __init__(self, limits: Limits | None = None, most: int | None = None) -> None:
        self.limits = limits
        self._places = threading.Semaphore(most or max(4, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._namespaces: bool | None = None  # whether the first sandbox got namespaces

    @contextmanager
    def lent(self) -> Iterator[Sandbox]:
        """Lend a sandbox to the caller.

        Raises:
            OSError: this system cannot contain a program.
        """
        with self._places:
            with self._lock:
                if not self._idle:  # made one at a time, so that all have the same containment as the first
                    self._idle.append(Sandbox(self.limits, namespaces=self._namespaces))
                sandbox = self._idle.pop()
                self._namespaces = sandbox.namespaces
            try:
                yield sandbox
            finally:
                with self._lock:
                    self._idle.append(sandbox)


def taken_away() -> list[str]:
    """Return which of `FEATURES` the environment takes away.

    Raises:
        ValueError: it names something else.
    """
    names = [name.strip() for name in os.environ.get("ROLLTREE_SANDBOX_WITHOUT", "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(f"ROLLTREE_SANDBOX_WITHOUT names '{unknown[0]}'; it knows {', '.join(FEATURES)}.")
    return names


def package_folders(name: str) -> list[str]:
    """Return the folders of an installed package: its own, and that of its shared libraries.

    Raises:
        ValueError: it is not installed, or no folder.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the option 'packages' names '{name}', which is no installed package")
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    return [str(path) for path in (folder, folder.with_name(f"{folder.name}.libs")) if path.is_dir()]


def _map_users(pid: int) -> bool:
    """Map the users of a process in a user namespace. Returns True if a second user is mapped.

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
