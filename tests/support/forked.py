"""Workers for tests: ranks in processes that a server forks where everything is imported, all others in threads."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import torch

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.fleet.workers import InThreads, LostError, Reference, Role, Worker, settle

IMPORTED = ["rolltree.engine.app.assembly.run", "rolltree.engine.app.console", "torch.distributed.fsdp",
            "transformers.models.qwen3.modeling_qwen3", __name__]  # fmt: skip

TokenTree.from_sequences([1], [[2], [3]])  # numba compiles here, in the server too


class Stored:
    """A copy of a value whose arrays are read-only, as in the memory that processes share."""

    def __init__(self, value: Any) -> None:
        self._buffers: list[bytes] = []
        self._pickled = pickle.dumps(value, 5, buffer_callback=lambda given: self._buffers.append(bytes(given.raw())))

    def get(self) -> Any:
        return pickle.loads(self._pickled, buffers=self._buffers)


class Forked(InThreads):
    """Workers of a run; `ranks` has those that train, in the order of their starts."""

    def __init__(self) -> None:
        super().__init__()
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self.ranks: list[ForkedWorker] = []

    def start(self, role: Role, index: int, make: Callable[..., object], *args: Any) -> Worker:
        if role != "rank":
            return super().start(role, index, make, *args)
        self.ranks.append(ForkedWorker(self._context, f"{role} {index}", make, args))
        return self.ranks[-1]

    @staticmethod
    def put(value: Any) -> Reference:
        return Stored(value)

    def close(self) -> None:
        super().close()
        for rank in self.ranks:
            rank.kill()


class ForkedWorker:
    """A process that runs the calls of one object."""

    def __init__(self, context: Any, name: str, make: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._name, self._open, self._lock, self._killed = name, {}, threading.Lock(), False  # type: ignore[var-annotated]
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()
        self._asked = 0
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._killed:
                answer.set_exception(LostError(f"{self._name} was killed."))
                return answer
            self._asked += 1
            self._open[self._asked] = answer
            try:
                self._pipe.send((self._asked, method, args))
            except OSError:
                del self._open[self._asked]
                answer.set_exception(LostError(f"{self._name} has ended."))
        return answer

    def kill(self) -> None:
        with self._lock:
            self._killed = True
        self.process.kill()
        self._lose("was killed")

    def _read(self) -> None:
        while True:
            try:
                number, value, error = self._pipe.recv()
            except (EOFError, OSError):
                self._lose("has ended")
                return
            with self._lock:
                answer = self._open.pop(number, None)
            if answer is not None:
                settle(answer, value, error=error)

    def _lose(self, how: str) -> None:
        with self._lock:
            lost, self._open = self._open, {}
        for answer in lost.values():
            settle(answer, error=LostError(f"{self._name} {how}."))


def _serve(pipe: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    made = None
    while True:
        number, method, given = pipe.recv()
        value = error = None
        try:
            made = make(*args) if made is None else made
            value = getattr(made, method)(*given)
        except BaseException as raised:
            error = raised
        pipe.send((number, value, error))
