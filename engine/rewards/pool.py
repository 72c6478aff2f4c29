"""RewardPool: verifiers in processes of their own, because a verifier may hang, crash or end the interpreter.

Units, which are single responses or, for a judge of groups, all responses of a group, go to the workers in batches, and
answers come back one by one, so the unit that a worker computes is always known. A worker that sends no answer for
``timeout_s`` is killed with everything it has started (`keeper.py`), the result of the unit's responses is ``timeout``,
and the rest of its batch goes back to the queue; likewise if a worker dies or sends malformed data. The pool never
blocks on one worker, neither sending nor receiving. Order is kept, and results do not depend on which worker computed
them. Workers are started by ``exec``, not ``fork``, so they inherit nothing of torch.

`pebble.ProcessPool` (5.2) is no substitute: what a verifier has started in a session of its own survives the kill, a
worker survives the parent's, what a worker sends is unpickled in the parent, and bytes written to the pipes of the
pool, which all workers share, end its service.

Any number of threads may call the pool at once. It has no thread of its own: one of the waiting threads serves the
workers for all of them, and another takes over once that thread has its own answers.
"""

from __future__ import annotations

import contextlib
import itertools
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
"""Seconds that a worker may take to import its verifier (sympy, reasoning_gym, user code)."""
MAX_BATCH = 64
LONGEST_ANSWER = 1 << 16
"""Largest answer accepted for each response of a unit, in bytes; a verdict has some hundreds."""
KILL_S = 10.0
"""Seconds to wait for a keeper to end; its own limit is shorter."""


@dataclass(eq=False)
class _Job:
    """The units of one call, and their results so far."""

    units: Sequence[Sequence[RewardItem]]
    check: bool = False
    """Check only the entries, without responses."""
    results: list[list[RewardResult] | None] = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.results, self.left = [None] * len(self.units), len(self.units)

    def settle(self, index: int, results: list[RewardResult]) -> None:
        self.results[index] = results
        self.left -= 1


class RewardPool(Rewards):
    """Verifier processes; a context manager, which starts and kills them.

    Args:
        config: the verifier, the number of workers, and the time limit of one verification.
        tasks: the `reasoning_gym` tasks (`data.tasks`), for the verifier ``task``.
    """

    def __init__(self, config: RewardConfig, tasks: Sequence[TaskConfig] = ()) -> None:
        self._config, self.by_group = config, config.by_group
        setup = {
            "verifier": config.verifier,
            "tasks": [(task.name, task.options) for task in tasks],
            "options": config.options,
            "timeout_s": config.timeout_s,
            "by_group": config.by_group,
        }
        self._start = lambda: _Worker(setup, config.timeout_s)
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[_Job, range]] = deque()
        self._turn = threading.Condition()
        self._led = False  # True while some caller's thread serves the workers
        # set while the pool cannot judge: before it is started, after a failure, and once it is closed
        self._error: Exception | None = ValueError("The reward pool is not started; use it in a `with` statement.")
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)  # runs at interpreter exit too

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            UserError: the verifier cannot be loaded.
            ValueError: the pool was started before.
        """
        if self._workers or not self._finalizer.alive:
            raise ValueError("A reward pool starts once; make another one.")
        self._error = None
        self._workers += [self._start() for _ in range(self._config.workers)]
        try:
            while not all(worker.ready for worker in self._workers):
                self._collect()
        except UserError:
            self.close()
            raise
        return self

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return the verdict on every item, in the order given.

        Raises:
            UserError: a worker had to be replaced and the verifier no longer loads.
            ValueError: the pool is not started, or closed.
        """
        if not self.by_group:
            return self._do(_Job([[item] for item in items]))
        alone = itertools.count(-1, -1)
        of_groups = itertools.groupby(items, lambda item: next(alone) if item.group is None else item.group)
        return self._do(_Job([list(members) for _, members in of_groups]))

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        """Let the verifier read the problems' entries; see `Rewards.check`."""
        job = _Job([[RewardItem("", entry)] for entry in entries], check=True)
        return [result.reason for result in self._do(job)]

    def _do(self, job: _Job) -> list[RewardResult]:
        count = len(job.units)
        size = min(MAX_BATCH, max(1, math.ceil(count / (4 * self._config.workers))))
        with self._turn:
            if self._error is not None:
                raise self._error
            self._queue.extend((job, range(start, min(start + size, count))) for start in range(0, count, size))
            self._rouse()
            while job.left:
                if self._error is not None:
                    raise self._error
                if self._led:
                    self._turn.wait()
                else:
                    self._lead()
        return [result for unit in job.results if unit is not None for result in unit]

    def _rouse(self) -> None:
        """Wake the thread that currently serves the workers, so that it reads the queue."""
        with contextlib.suppress(OSError):  # already awake, or closed
            self._wake.send(b"!")

    def _lead(self) -> None:
        """Serve the workers once, for all callers; the lock is held before and after."""
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
        """Kill the workers; waiting and later callers get an error. Closing twice has no further effect."""
        with self._turn:
            self._error = self._error or ValueError("The reward pool is closed; make another one.")
            self._rouse()
            while self._led:
                self._turn.wait()
        self._finalizer()
        self._wake.close()
        self._woken.close()

    def _collect(self) -> None:
        """Wait for the next answers or time-outs and record their results; replace workers that failed."""
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
                unit = worker.job.units[worker.pending[0]]
                worker.job.settle(worker.pending[0], [RewardResult(None, failure)] * len(unit))
                if rest := worker.pending[1:]:
                    self._queue.appendleft((worker.job, rest))
            worker.kill()
            self._workers[index] = self._start()

    def _wait(self) -> set[_Worker]:
        """Send queued data once and wait; return the workers with data to receive.

        Returns early when the queue has new items or a deadline has passed.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in self._workers:
                writes = selectors.EVENT_WRITE if worker.outbox else 0
                selector.register(worker.connection, selectors.EVENT_READ | writes, worker)
            wait = min(worker.deadline for worker in self._workers) - time.monotonic()
            ready = selector.select(max(0.0, min(wait, START_S)))
        for key, events in ready:
            if key.data is None:
                self._woken.recv(4096)
            elif events & selectors.EVENT_WRITE:
                key.data.flush()
        return {key.data for key, events in ready if key.data is not None and events & selectors.EVENT_READ}

    def _take(self, worker: _Worker) -> None:
        """Record the answers that a worker has sent.

        Raises:
            EOFError, OSError: the worker died or sent malformed data, while at the first of its pending items.
        """
        for message in worker.receive():
            if not worker.ready:
                if message[0] != "ready":
                    raise _broken(self._config.verifier, message[1])
                self.note = message[1]
                worker.ready = True
            elif not worker.pending or message[0] != worker.pending[0]:
                raise EOFError  # not the answer to the item it was given
            else:
                assert worker.job is not None
                if len(message[1]) != len(worker.job.units[worker.pending[0]]):
                    raise EOFError
                worker.job.settle(worker.pending[0], [RewardResult(*verdict) for verdict in message[1]])
                worker.pending = worker.pending[1:]
            worker.set_deadline()


class _Worker:
    """A worker process, its connection, and the items it has not answered yet."""

    def __init__(self, setup: dict[str, Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.ready = False
        self.job: _Job | None = None
        self.pending = range(0)
        """Indices of its job's items that it was given and has not answered; it computes the first."""
        self.longest = LONGEST_ANSWER
        self.outbox = bytearray()
        self._inbox = bytearray()
        self._token = os.urandom(16)
        self.connection, worker_end = socket.socketpair()
        self.lifeline, its_end = socket.socketpair()
        with worker_end, its_end:
            fds = [its_end.fileno(), worker_end.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(KEEPER), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is handled by the run alone
            )
        self.connection.setblocking(False)
        self._send(setup | {"token": self._token})
        self.deadline = time.monotonic() + START_S

    def give(self, job: _Job, batch: range) -> None:
        self.job, self.pending = job, batch
        self.longest = LONGEST_ANSWER * max((len(job.units[i]) for i in batch), default=1)
        self.set_deadline()
        self._send(
            [(i, None if job.check else [r.response_text for r in job.units[i]], job.units[i][0].entry) for i in batch]
        )

    def set_deadline(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s if self.pending else math.inf

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)
        self.outbox += LENGTH.pack(len(content)) + content
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts without blocking."""
        try:
            while self.outbox:
                del self.outbox[: self.connection.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the worker died; the next wait finds the connection closed
            self.outbox.clear()

    def receive(self) -> Iterator[Any]:
        """Yield the complete messages that have arrived.

        Raises:
            EOFError, OSError: the connection is closed, or the data is not framed as the worker's answers.
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
            if length > self.longest or (
                len(self._inbox) >= end and zlib.crc32(self._inbox[HEADER.size : end]) != checksum
            ):
                raise EOFError
            if len(self._inbox) < end:
                return
            message = json.loads(self._inbox[HEADER.size : end])
            del self._inbox[:end]
            yield message

    def release(self) -> None:
        """Make the keeper kill the worker and everything it has started."""
        with contextlib.suppress(OSError):  # shutdown and not only close, since a fork may hold a copy
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
