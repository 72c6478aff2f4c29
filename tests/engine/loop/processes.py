"""Training runs in processes of their own, forked where everything is imported: what is random is when they die."""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SocketIO

import torch

from rolltree.engine import TokenTree
from rolltree.engine.app.cli import main

from ..tiny import ROOT

LATE = (
    "pandas", "pyarrow.parquet", "reasoning_gym", "transformers.models.qwen3.modeling_qwen3",
    "rolltree.engine.app.console", "rolltree.engine.app.report", "rolltree.engine.loop.orchestrator",
)  # fmt: skip
"""What a run loads late."""
Server = SocketIO
"""The connection to the process that forks the runs."""


class Process:
    """`rolltree` with ``arguments``."""

    def __init__(self, server: Server, arguments: list[str]) -> None:
        self.told = server
        server.write(json.dumps(arguments).encode() + b"\n")
        self.pid = int(self.told.readline())

    def ended(self) -> bool:
        return bool(select.select([self.told], [], [], 0)[0])

    def wait(self) -> int:
        return int(self.told.readline())

    def await_row(self, log: Path, count: int) -> None:
        while not self.ended() and not (log.exists() and log.read_text().count("\n") >= count):
            time.sleep(0.005)


@contextmanager
def forking() -> Iterator[Server]:
    """Yield the connection to a fork of this process that forks the runs: it has no thread but its own."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if server == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    with ours, ours.makefile("rwb", buffering=0) as connection:  # for `select`
        yield connection  # type: ignore[misc]
    os.waitpid(server, 0)


def _serve(connection: socket.socket) -> None:
    status = 1
    try:
        os.chdir(ROOT)
        torch.set_num_threads(1)
        for name in LATE:
            importlib.import_module(name)
        TokenTree.from_sequences([1], [[2], [3]])  # numba
        for line in connection.makefile("rb"):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                os._exit(main(json.loads(line)))
            connection.sendall(b"%d\n" % child)
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        status = 0
    finally:
        os._exit(status)
