"""Containers of podman or docker, by their command lines.

A container has the label of its `Owned` folder, by which it is removed when its process is gone, killed or not. What
runs in it is started by ``exec``; it is ended there too, as the end of the command line's client ends nothing.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .owned import LABEL, Owned, orphans

KNOWN = ("podman", "docker")
ASK_S = 120.0
"""Seconds in which the engine must answer, for all but builds and commands of containers."""
LOOK_S = 0.05
END_S = 5.0
"""Seconds in which a killed command must have ended."""
LAST = 5
"""Lines of the end of the engine's output that an error quotes."""
FOREVER = ("sh", "-c", "sleep infinity")
"""The command of a container, after its image's entry point, as of Harbor's containers."""
WRAPPER = 'echo $$; exec 2>&1; exec "$@"'
"""Tells the process id in the container, which is that of a session of its own, and becomes the command."""
UNUSABLE = 125
"""Exit code of the engine where it, and no command, has failed."""


class ContainerError(UserError):
    """The engine has failed, or a container is gone."""


@dataclass(frozen=True)
class Output:
    """The end of a command in a container.

    Attributes:
        code: its exit code; None where it was killed because its time was over or nobody waits any more.
        text: what it wrote to its standard output and error, its middle left out where it is long.
    """

    code: int | None
    text: str


class Engine:
    """The command line of podman or docker.

    Args:
        words: the program with its global options; empty: the one of `KNOWN` that is installed.

    Raises:
        UserError: there is none.
    """

    def __init__(self, words: Sequence[str] = ()) -> None:
        if not words:
            words = [name for name in KNOWN if shutil.which(name)][:1]
            if not words:
                raise UserError(f"There is neither {' nor '.join(KNOWN)} for containers; install one of them.")
        if shutil.which(words[0]) is None:
            raise UserError(f"There is no program '{words[0]}' for containers; install it, or name another `engine`.")
        self.words = tuple(words)
        self._lock = threading.Lock()
        self._owned: Owned | None = None

    @property
    def owned(self) -> Owned:
        """The folder of this process's containers; the first use removes those of processes that are gone."""
        with self._lock:
            if self._owned is None:
                for name in orphans(self.words):
                    self.remove(name)
                self._owned = Owned(self.words)
            return self._owned

    def close(self) -> None:
        """Remove all containers of this process."""
        with self._lock:
            if self._owned is not None:
                self._owned.close()
                self._owned = None

    def ask(self, *words: str, seconds: float = ASK_S) -> str:
        """Return what the engine writes to its standard output.

        Raises:
            ContainerError: it fails, or takes longer than ``seconds``.
        """
        command = [*self.words, *words]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=seconds,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ContainerError(f"`{self.words[0]} {words[0]}` did not end within {seconds:g} s.") from error
        if done.returncode:
            said = _last(done.stderr or done.stdout)
            raise ContainerError(f"`{self.words[0]} {words[0]}` failed: {said or f'exit code {done.returncode}'}.")
        return done.stdout

    def has_image(self, image: str) -> bool:
        """Return whether an image is on this machine."""
        try:
            self.ask("image", "inspect", "--format", "{{.Id}}", image)
        except ContainerError:
            return False
        return True

    def container(self, image: str, options: Sequence[str]) -> Container:
        """Start a container that waits for commands.

        Raises:
            ContainerError: it cannot be started.
        """
        name = f"rolltree-{secrets.token_hex(8)}"
        owner = f"{LABEL}={self.owned.label}"
        try:
            self.ask("run", "--detach", "--pull=never", "--name", name, "--label", owner, "--stop-timeout", "0",
                     *options, image, *FOREVER)  # fmt: skip
        except ContainerError:
            self.remove(name)
            raise
        return Container(self, name)

    def remove(self, name: str) -> None:
        """Remove a container, with its processes, if it exists."""
        with suppress(ContainerError):
            self.ask("rm", "--force", "--volumes", name)


class Container:
    """A container that has been started."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name

    def run(
        self,
        words: Sequence[str],
        seconds: float,
        *,
        user: str | None = None,
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        most: int = 20_000,
        over: Callable[[], bool] = lambda: False,
    ) -> Output:
        """Run a command until it ends, its time is over or ``over`` says that nobody waits for it; it is then killed.

        Args:
            folder: its working directory; default: the image's.
            most: bytes of its output that are kept.

        Raises:
            ContainerError: the container has ended, or it has no such user or directory.
        """
        options = ["--user", user] if user is not None else []
        options += ["--workdir", folder] if folder is not None else []
        options += [word for name, value in (variables or {}).items() for word in ("--env", f"{name}={value}")]
        command = [*self.engine.words, "exec", *options, self.name, "sh", "-c", WRAPPER, "sh", *words]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        kept = _Kept(process, most)
        end = time.monotonic() + seconds
        code = None
        while (code := process.poll()) is None and time.monotonic() < end and not over():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        if code is None:
            self._kill(process, kept)
        text = kept.text()
        if kept.pid is None and code is not None:
            raise ContainerError(f"No command can be run in the container {self.name}: {_last(text) or '-'}.")
        return Output(code, text)

    def _kill(self, process: subprocess.Popen[bytes], kept: _Kept) -> None:
        """Kill a command with its process group, and its client if that does not end then."""
        if kept.pid is not None:
            with suppress(ContainerError):
                self.engine.ask("exec", "--user", "0", self.name, "sh", "-c", 'kill -9 "-$0"', kept.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        if process.poll() is None:
            process.kill()
            process.wait()

    def restart(self, between: Callable[[], None]) -> None:
        """End all processes of the container, call ``between``, and start it again with the files that it has.

        Raises:
            ContainerError: this fails.
        """
        self.engine.ask("stop", self.name)
        between()
        self.engine.ask("start", self.name)

    @property
    def pid(self) -> int:
        """The process id of the container's first process, on this machine.

        Raises:
            ContainerError: it does not run.
        """
        pid = int(self.engine.ask("inspect", "--format", "{{.State.Pid}}", self.name))
        if pid <= 0:
            raise ContainerError(f"The container {self.name} has ended.")
        return pid

    def remove(self) -> None:
        """Remove the container."""
        self.engine.remove(self.name)


class _Kept:
    """The beginning and the end of what a command writes, after a line with its process id."""

    def __init__(self, process: subprocess.Popen[bytes], most: int) -> None:
        self.pid: str | None = None
        self._half = max(most // 2, 1)
        self._first, self._rest, self._size = bytearray(), bytearray(), 0
        self._stream: Any = process.stdout
        self._thread = threading.Thread(target=self._read, name="rolltree-container-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream as stream:
            line = stream.readline(4096)
            if re.fullmatch(rb"\d+\n", line):
                self.pid = line.decode().strip()
            else:
                self._keep(line)
            while block := stream.read1(65536):
                self._keep(block)

    def _keep(self, block: bytes) -> None:
        self._size += len(block)
        room = self._half - len(self._first)
        self._first += block[:room]
        self._rest += block[room:]
        del self._rest[: -self._half]

    def text(self) -> str:
        """Return the text, once the command has ended."""
        self._thread.join(END_S)
        first, rest = bytes(self._first), bytes(self._rest)
        if (left := self._size - len(first) - len(rest)) == 0:
            return (first + rest).decode(errors="replace")
        return f"{first.decode(errors='replace')}\n... ({left} bytes left out)\n{rest.decode(errors='replace')}"


def _last(text: str) -> str:
    """Return the last lines of the engine's output as one."""
    lines = [line for line in text.splitlines() if line.strip()][-LAST:]
    return " ".join(" ".join(lines).split())[-500:].rstrip(".")


def listen_inside(pid: int, port: int) -> int:
    """Return the file descriptor of a socket that listens on the loopback address of a process's network.

    Raises:
        ContainerError: this user may not enter that network, or the port is taken there.
    """
    ours, far = socket.socketpair()
    script = Path(__file__).with_name("inside.py")
    with ours, far:
        words = [sys.executable, "-IS", str(script), str(pid), str(port), str(far.fileno())]
        done = subprocess.run(
            words, pass_fds=[far.fileno()], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise ContainerError(
                f"The run cannot listen at port {port} in a container ({done.stderr.strip() or done.returncode}); that "
                "takes podman as this user, or docker as root, and an image that leaves the port free."
            )
        return socket.recv_fds(ours, 1, 1)[1][0]
