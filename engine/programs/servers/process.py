"""A server that a command starts, on a free port of this machine, and that ends with the run."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ...errors import UserError
from ...sandbox.watched import watched

START_S = 120.0
"""Seconds in which a server must answer after its start."""
PORT = "{port}"
"""Stands for the port in a word of the command; the variable ``PORT`` of its environment has it too."""
LINES = 5
"""The last lines of a server's output that an error quotes."""


class Command:
    """A command that serves HTTP; it is started by the first `address`, and again where it has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=LINES)
        self._address = ""

    def address(self) -> str:
        """Return the address of the server, which answers.

        Raises:
            UserError: there is no such program, it has ended, or it does not answer.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._address

    def close(self) -> None:
        """End the server and all that it started."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [word.replace(PORT, port) for word in self.command]
        self._address = f"http://127.0.0.1:{port}"
        self._process = process = subprocess.Popen(
            watched(words), env=os.environ | {"PORT": port}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(process,), name="rolltree-server-output", daemon=True).start()
        end = time.monotonic() + START_S
        while not _answers(f"{self._address}/health"):
            if process.poll() is not None:
                time.sleep(0.1)  # for its last words
                said = " ".join(" ".join(self._said).split())[-500:]
                raise UserError(f"{self} ended with status {process.returncode} before it answered: {said or '-'}.")
            if time.monotonic() > end:
                self._end()
                raise UserError(
                    f"{self} did not answer on port {port} within {START_S:g} s; write {PORT} in the command where it "
                    "takes its port."
                )
            time.sleep(0.05)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as output, suppress(ValueError):
            while line := output.readline(4096):
                self._said.append(line)

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def __str__(self) -> str:
        return f"The server `{' '.join(self.command)}`"


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of this machine, by no proxy."""
