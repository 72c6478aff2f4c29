"""Training runs in processes of their own, forked where everything is imported: what is random is when they die."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVER = """
import json, os, sys, torch
torch.set_num_threads(1)
import pandas, pyarrow.parquet, reasoning_gym, transformers.models.qwen3.modeling_qwen3  # what a run loads late
import rolltree.engine.app.console, rolltree.engine.app.report, rolltree.engine.loop.orchestrator
from rolltree.engine.app.cli import main
from rolltree.engine import TokenTree
TokenTree.from_sequences([1], [[2], [3]])  # numba
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(json.loads(line)))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Server = subprocess.Popen[bytes]
"""The process that forks the runs."""


class Process:
    """`rolltree` with ``arguments``."""

    def __init__(self, server: Server, arguments: list[str]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self.told = server.stdout
        server.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.pid = int(self.told.readline())
        self.status: int | None = None

    def ended(self) -> bool:
        return self.status is not None or bool(select.select([self.told], [], [], 0)[0])

    def wait(self) -> int:
        """Return the exit status; the next process can be started after that."""
        if self.status is None:
            self.status = int(self.told.readline())
        return self.status

    def kill(self) -> None:
        """End the process if it runs."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def await_row(self, log: Path, count: int) -> None:
        while not self.ended() and not (log.exists() and log.read_text().count("\n") >= count):
            time.sleep(0.005)


@contextmanager
def forking() -> Iterator[Server]:
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0) as process:  # for `select`
        yield process
        assert process.stdin is not None
        process.stdin.close()
