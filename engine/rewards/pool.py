"""RewardPool: verifiers in processes of their own, because a verifier may hang, crash or take the interpreter with it.

Items go to the workers in batches, and each answer comes back by itself, so the pool always knows which item a worker
is at. A worker that gives no answer for ``timeout_s`` is killed with everything it has started (`keeper.py`), the
item's result is ``timeout``, and the rest of its batch goes back to the queue for others; likewise when a worker dies
or sends what is no answer. The pool never blocks on a worker, neither sending nor receiving. Order is kept, and results
do not depend on which worker computed them. Workers are started by ``exec``, not ``fork``: torch's threads and memory
stay out of them.

Any number of threads may ask at once. There is no thread of the pool's own: one of those that wait sees to the workers
for all of them, and hands over to another when it has its own answers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import UserError
from ..settings import RewardConfig, TaskConfig
from .interface import RewardItem, RewardResult, Rewards
from .worker import HEADER, LENGTH

KEEPER = Path(__file__).with_name("keeper.py")
START_S = 120.0
"""Time for a worker to import its verifier (sympy, reasoning_gym, user code)."""
MAX_BATCH = 64
LONGEST_ANSWER = 1 << 16
"""Bytes; a verdict has no more than some hundreds."""
KILL_S = 10.0
"""Time for a keeper to end; it gives up earlier by itself."""


@dataclass(eq=False)
class _Job:
    """What one caller wants judged."""

    items: Sequence[RewardItem]
    check: bool = False
    """Only their entries are checked."""
    results: list[RewardResult | None] = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.results, self.left = [None] * len(self.items), len(self.items)

    def settle(self, index: int, result: RewardResult) -> None:
        self.results[index] = result
        self.left -= 1


class RewardPool(Rewards):
    """Verifier processes; a context manager.

    Args:
        config: which verifier, how many workers, and the time limit of one verification.
        tasks: the `reasoning_gym` tasks (`data.tasks`), for the verifier ``task``.
    """

    def __init__(self, config: RewardConfig, tasks: Sequence[TaskConfig] = ()) -> None:
        self._config = config
        setup = {
            "verifier": config.verifier,
            "tasks": [(task.name, task.options) for task in tasks],
            "options": config.options,
            "timeout_s": config.timeout_s,
        }
        self._start = lambda: _Worker(setup, config.timeout_s)
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[_Job, range]] = deque()
        self._turn = threading.Condition()
        self._led = False  # whether some caller sees to the workers
        self._error: Exception | None = None  # why nothing more is judged
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)  # runs at interpreter exit too

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            UserError: the verifier cannot be loaded.
        """
        self._workers += [self._start() for _ in range(self._config.workers)]
        try:
            while not all(worker.ready for worker in self._workers):
                self._collect()
        except UserError:
            self.close()
            raise
        return self

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The verdict on every item, in the order given.

        Raises:
            UserError: a worker had to be replaced and the verifier no longer loads.
        """
        return self._do(_Job(items))

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        """Let the verifier read the problems: why it could judge no response to one, or None; see `Rewards.check`."""
        return [result.reason for result in self._do(_Job([RewardItem("", entry) for entry in entries], check=True))]

    def _do(self, job: _Job) -> list[RewardResult]:
        items = job.items
        size = min(MAX_BATCH, max(1, math.ceil(len(items) / (4 * self._config.workers))))
        with self._turn:
            if self._error is not None:
                raise self._error
            self._queue.extend(
                (job, range(start, min(start + size, len(items)))) for start in range(0, len(items), size)
            )
            self._rouse()
            while job.left:
                if self._error is not None:
                    raise self._error
                if self._led:
                    self._turn.wait()
                else:
                    self._lead()
        return [result for result in job.results if result is not None]

    def _rouse(self) -> None:
        """Let whoever sees to the workers look at the queue."""
        with contextlib.suppress(OSError):  # it is awake, or closed
            self._wake.send(b"!")

    def _lead(self) -> None:
        """See to the workers once, for all callers; the turn is held before and after."""
        self._led = True
        self._turn.release()
        try:
            for worker in self._workers:
                if worker.ready and not worker.pending and self._queue:
                    worker.give(*self._queue.popleft())
            self._collect()
        except UserError as error:
            self._error = error
        finally:
            self._turn.acquire()
            self._led = False
            self._turn.notify_all()

    def close(self) -> None:
        """Kill the workers; callers that wait get an error, as all later ones. Closing it twice does nothing."""
        with self._turn:
            self._error = self._error or ValueError("The reward pool is closed; make another one.")
            self._rouse()
            while self._led:
                self._turn.wait()
        self._finalizer()
        self._wake.close()
        self._woken.close()

    def _collect(self) -> None:
        """Wait for the next answers or time-outs, and settle what they settle."""
        readable = self._wait()
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            failure = None
            if worker in readable:
                try:
                    self._take(worker)
                except (EOFError, OSError):
                    failure = "died"
            elif now > worker.deadline:
                failure = "timeout"
            if failure is None:
                continue
            if not worker.ready:
                why = "died while starting" if failure == "died" else f"was not ready after {START_S:.0f} s"
                raise _broken(self._config.verifier, f"its process {why}")
            if worker.pending:
                assert worker.job is not None
                worker.job.settle(worker.pending[0], RewardResult(None, failure))
                if rest := worker.pending[1:]:
                    self._queue.appendleft((worker.job, rest))
            worker.kill()
            self._workers[index] = self._start()

    def _wait(self) -> set[_Worker]:
        """Send what is waiting to be sent, until something can be received, more is asked for or a time is up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in self._workers:
                writes = selectors.EVENT_WRITE if worker.outbox else 0
                selector.register(worker.connection, selectors.EVENT_READ | writes, worker)
            wait = min(worker.deadline for worker in self._workers) - time.monotonic()
            found = selector.select(max(0.0, min(wait, START_S)))
        for key, events in found:
            if key.data is None:
                self._woken.recv(4096)
            elif events & selectors.EVENT_WRITE:
                key.data.flush()
        return {key.data for key, events in found if key.data is not None and events & selectors.EVENT_READ}

    def _take(self, worker: _Worker) -> None:
        """Take what a worker has sent.

        Raises:
            EOFError, OSError: the worker died or sent what is no answer, at the first of its pending items.
        """
        for message in worker.receive():
            if not worker.ready:
                if message[0] != "ready":
                    raise _broken(self._config.verifier, message[1])
                self.note = message[1]
                worker.ready = True
            elif not worker.pending or message[0] != worker.pending[0]:
                raise EOFError  # not the answer to what it was asked
            else:
                assert worker.job is not None
                worker.job.settle(worker.pending[0], RewardResult(*message[1:]))
                worker.pending = worker.pending[1:]
            worker.set_deadline()


class _Worker:
    """A process, what it was given, and what of it is under way."""

    def __init__(self, setup: dict[str, Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ready = False
        self.job: _Job | None = None
        self.pending = range(0)
        """Items of its job given and not answered; it is at the first."""
        self.outbox = bytearray()
        self._inbox = bytearray()
        self._token = os.urandom(16)
        self.connection, theirs = socket.socketpair()
        self.lifeline, its_end = socket.socketpair()
        with theirs, its_end:
            fds = [its_end.fileno(), theirs.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(KEEPER), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
        self.connection.setblocking(False)
        self._send(setup | {"token": self._token})
        self.deadline = time.monotonic() + START_S

    def give(self, job: _Job, batch: range) -> None:
        self.job, self.pending = job, batch
        self.set_deadline()
        self._send([(i, None if job.check else job.items[i].response_text, job.items[i].entry) for i in batch])

    def set_deadline(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s if self.pending else math.inf

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)
        self.outbox += LENGTH.pack(len(content)) + content
        self.flush()

    def flush(self) -> None:
        """Send as much as it takes now."""
        try:
            while self.outbox:
                del self.outbox[: self.connection.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # it died; the next wait finds the connection closed
            self.outbox.clear()

    def receive(self) -> Iterator[Any]:
        """The whole messages that are there.

        Raises:
            EOFError, OSError: it hung up, or something else than its answers has come.
        """
        content = self.connection.recv(1 << 20)
        self._inbox += content
        if not content:
            raise EOFError
        while self._inbox:
            if not self._inbox.startswith(self._token[: len(self._inbox)]):
                raise EOFError
            if len(self._inbox) < HEADER.size:
                return
            _, length, checksum = HEADER.unpack_from(self._inbox)
            end = HEADER.size + length
            if length > LONGEST_ANSWER or (
                len(self._inbox) >= end and zlib.crc32(self._inbox[HEADER.size : end]) != checksum
            ):
                raise EOFError
            if len(self._inbox) < end:
                return
            message = json.loads(self._inbox[HEADER.size : end])
            del self._inbox[:end]
            yield message

    def release(self) -> None:
        """Let its keeper kill it and all it has started."""
        with contextlib.suppress(OSError):  # shut down, not only closed: a fork may hold a copy
            self.lifeline.shutdown(socket.SHUT_RDWR)
        self.lifeline.close()
        self.connection.close()

    def kill(self) -> None:
        self.release()
        try:
            self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _broken(verifier: str, why: str) -> UserError:
    return UserError(f"The verifier '{verifier}' (reward.verifier) cannot be used: {why.rstrip('.')}.")


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.release()
    while workers:
        workers.pop().kill()
