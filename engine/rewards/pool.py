"""RewardPool: verifiers in processes of their own, because a verifier may hang, crash or take the interpreter with it.

Items go to the workers in batches, and each answer comes back by itself, so the pool always knows which item a worker
is at. A worker that gives no answer for ``timeout_s`` is killed, the item's result is ``timeout``, and the rest of its
batch goes back to the queue for others; likewise when a worker dies. Order is kept, and results do not depend on which
worker computed them. Workers are started by ``exec``, not ``fork``: torch's threads and memory stay out of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UserError
from ..settings import RewardConfig, TaskConfig

WORKER = Path(__file__).with_name("worker.py")
START_S = 120.0
"""Time for a worker to import its verifier (sympy, reasoning_gym, user code)."""
MAX_BATCH = 64


@dataclass(frozen=True)
class RewardItem:
    """A response to judge."""

    response_text: str
    entry: dict[str, Any]
    """`Prompt.entry`: for the verifier ``task`` an item of its dataset, for the others a row with an ``answer``."""


@dataclass(frozen=True)
class RewardResult:
    """A verdict: a finite value, or None and the reason why there is none."""

    value: float | None
    reason: str | None
    """`timeout`, `died`, or what the verifier raised."""


class RewardPool:
    """Verifier processes; a context manager.

    Args:
        config: which verifier, how many workers, and the time limit of one verification.
        tasks: the `reasoning_gym` tasks (`data.tasks`), for the verifier ``task``.

    Raises:
        UserError: the verifier cannot be loaded.
    """

    def __init__(self, config: RewardConfig, tasks: Sequence[TaskConfig] = ()) -> None:
        self._config = config
        self._setup = {
            "verifier": config.verifier,
            "tasks": [(task.name, task.options) for task in tasks],
            "timeout_s": config.timeout_s,
        }
        self._workers = [_Worker(self._setup) for _ in range(config.workers)]
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)  # runs at interpreter exit too
        try:
            for worker in self._workers:
                if not worker.connection.poll(START_S):
                    raise _broken(config.verifier, f"its process was not ready after {START_S:.0f} s")
                self._started(worker)
        except UserError:
            self.close()
            raise

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The verdict on every item, in the order given.

        Raises:
            UserError: a worker had to be replaced and the verifier no longer loads.
        """
        if not self._workers:
            raise ValueError("The reward pool is closed; make another one.")
        results: list[RewardResult | None] = [None] * len(items)
        size = min(MAX_BATCH, max(1, math.ceil(len(items) / (4 * len(self._workers)))))
        queue = deque(range(start, min(start + size, len(items))) for start in range(0, len(items), size))
        left = len(items)
        while left:
            for worker in self._workers:
                if worker.ready and not worker.pending and queue:
                    worker.give(queue.popleft(), items)
            left -= self._collect(results, queue)
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Kill the workers. The pool cannot be used any more; closing it twice does nothing."""
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, results: list[RewardResult | None], queue: deque[range]) -> int:
        """Wait for the next answers or time-outs; how many items are settled by them."""
        settled = 0
        wait = min(worker.deadline for worker in self._workers) - time.monotonic()
        answered = connection.wait([worker.connection for worker in self._workers], max(0.0, min(wait, START_S)))
        now = time.monotonic()
        for index, worker in enumerate(self._workers):
            failure, asked = None, len(worker.pending)
            if worker.connection in answered:
                try:
                    self._take(worker, results)
                except (EOFError, OSError):
                    failure = "died"
            elif now > worker.deadline:
                failure = "timeout"
            settled += asked - len(worker.pending)  # also what a worker answered before it died
            if failure is None:
                continue
            if not worker.ready:
                raise _broken(self._config.verifier, f"a new process of it {failure} while starting")
            if worker.pending:
                results[worker.pending[0]] = RewardResult(None, failure)
                settled += 1
                if rest := worker.pending[1:]:
                    queue.appendleft(rest)
            worker.kill()
            self._workers[index] = _Worker(self._setup)
        return settled

    def _take(self, worker: _Worker, results: list[RewardResult | None]) -> None:
        """Take what a worker has sent.

        Raises:
            EOFError, OSError: the worker died, at the first of its pending items.
        """
        if not worker.ready:
            self._started(worker)
            return
        if not worker.pending:
            raise EOFError  # readable with nothing asked of it: it hung up
        while worker.pending and worker.connection.poll():
            value, reason = json.loads(worker.connection.recv_bytes())
            results[worker.pending[0]] = RewardResult(value, reason)
            worker.pending = worker.pending[1:]
        worker.set_deadline(self._config.timeout_s)

    def _started(self, worker: _Worker) -> None:
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            raise _broken(self._config.verifier, "its process died while starting") from None
        if message != ["ready"]:
            raise _broken(self._config.verifier, message[1])
        worker.ready = True
        worker.set_deadline(self._config.timeout_s)


@dataclass
class _Worker:
    """A process and what it was given."""

    setup: dict[str, Any]
    ready: bool = False
    pending: range = range(0)
    """Items given and not answered; it is at the first."""
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL
            )
        self.connection.send(self.setup)
        self.deadline = time.monotonic() + START_S

    def give(self, batch: range, items: Sequence[RewardItem]) -> None:
        self.pending = batch
        self.set_deadline(self.setup["timeout_s"])
        with contextlib.suppress(OSError):  # it died; the next wait finds the connection closed
            self.connection.send([(items[i].response_text, items[i].entry) for i in batch])

    def set_deadline(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s if self.pending else math.inf

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def _broken(verifier: str, why: str) -> UserError:
    return UserError(f"The verifier '{verifier}' (reward.verifier) cannot be used: {why.rstrip('.')}.")


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
