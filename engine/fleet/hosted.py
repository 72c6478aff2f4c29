"""Reward hosts: verifiers in other processes, which together are the run's `Rewards`.

Each host is a worker whose object is a `RewardHost`: the run's verifier there, with its own processes and all its rules
(`rolltree.engine.rewards.pool`). Items wait in one queue. A chunk of them goes to the host with the fewest unanswered
items, which has at most `AHEAD` chunks, so a slow host does not keep what a fast one could judge.

A host that ends, that does not answer within ``hang_s``, or that takes longer for a chunk than its verifiers may, is
killed and replaced; its items are asked elsewhere. A verdict is part of the value of one future; those of a killed host
are discarded with it, so no item has two. One thread does all this, and callers wait for its futures.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from ..errors import RunError
from ..rewards import RewardItem, RewardResult, Rewards, make_rewards
from ..settings import RewardConfig, TaskConfig
from .workers import GoneError, LostError, Worker, Workers, settle

AHEAD = 2
"""Most unanswered chunks of one host: the one that it judges, and the next."""
LARGEST = 64
"""Most items of a chunk, unless `reward.workers` needs more."""
LOOK_S = 1.0
"""Most seconds between two checks of the hosts."""
HEALTH_S = 5.0
"""Seconds between two questions whether a host answers."""
REPLACE_S = 10.0
"""Seconds that a verifier process that ran out of time may take to be killed and started again."""


class HostFacts(NamedTuple):
    """The note of the host's verifier (see `Rewards`), and the host's process."""

    note: str
    pid: int


class RewardHost:
    """The run's verifier, started, in the process of a reward host. A later call does not wait for an earlier one."""

    def __init__(self, config: RewardConfig, tasks: Sequence[TaskConfig]) -> None:
        self.rewards = make_rewards(config, tasks).__enter__()
        self._threads = ThreadPoolExecutor(AHEAD, "rolltree-judging")

    def score(self, items: Sequence[RewardItem]) -> Future[list[RewardResult]]:
        """See `Rewards.score`; texts that are elsewhere are fetched here."""
        return self._threads.submit(lambda: self.rewards.score([item.fetched() for item in items]))

    def check(self, entries: Sequence[dict[str, Any]]) -> Future[list[str | None]]:
        """See `Rewards.check`."""
        return self._threads.submit(self.rewards.check, entries)

    def facts(self) -> HostFacts:
        """Return what does not change. An answer also shows that the process runs."""
        return HostFacts(self.rewards.note, os.getpid())


class _Call:
    """A call of `HostedRewards`, and its answers so far."""

    def __init__(self, method: str, values: Sequence[Any]) -> None:
        self.method, self.values = method, values
        self.answers: list[Any] = [None] * len(values)
        self.left = len(values)
        self.future: Future[list[Any]] = Future()

    def settle(self, start: int, answers: Sequence[Any]) -> None:
        self.answers[start : start + len(answers)] = answers
        self.left -= len(answers)
        if not self.left:
            settle(self.future, self.answers)


@dataclass(eq=False)
class _Chunk:
    """Some items of a call; ``late`` is the time at which its host counts as hung."""

    call: _Call
    start: int
    values: Sequence[Any]
    lost: int = 0
    late: float = math.inf


@dataclass(eq=False)
class _Host:
    """A worker and what it has been asked."""

    index: int
    worker: Worker
    facts: Future[HostFacts] | None
    """The unanswered question whether it has started or, later, whether it answers."""
    asked_at: float
    """Time of the newest such question."""
    serving: bool = False
    pid: int | None = None
    chunks: dict[Future[list[Any]], _Chunk] = field(default_factory=dict)

    @property
    def load(self) -> int:
        """Number of unanswered items."""
        return sum(len(chunk.values) for chunk in self.chunks.values())

    def futures(self) -> Iterator[Future[Any]]:
        yield from self.chunks
        if self.facts is not None:
            yield self.facts


class HostedRewards(Rewards):
    """Judges by verifiers in other processes; see the module's description.

    Args:
        config: the verifier; each of ``config.hosts`` processes has ``config.workers`` of its own.
        tasks: the `reasoning_gym` tasks (`data.tasks`), for the verifier ``task``.
        workers: starts the hosts, at once and without waiting for them.
        hang_s: seconds without an answer after which a host is replaced.
        start_s: seconds that a host may take to start: a process, and the imports of the verifier in its own.
        restarts: most losses without an answer between them, and most of one chunk of items.
        make: makes the object of a host, in its process, from ``config`` and ``tasks``.
    """

    fetches = True

    def __init__(
        self,
        config: RewardConfig,
        tasks: Sequence[TaskConfig],
        workers: Workers,
        *,
        hang_s: float,
        start_s: float,
        restarts: int,
        make: Callable[..., Any] = RewardHost,
    ) -> None:
        self.at_once = AHEAD * config.hosts
        self._workers, self._make, self._args = workers, make, (config, tasks)
        self._hang_s, self._start_s, self._restarts = hang_s, start_s, restarts
        self._smallest, self._each_s = 2 * config.workers, config.timeout_s + REPLACE_S
        self._new: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._waiting: deque[_Chunk] = deque()
        self._lock = threading.Lock()  # of `_news` and `_error`
        self._news: Future[None] = Future()  # done when there is a new call, or the end
        self._error: Exception | None = None  # for later callers
        self._lost = 0  # hosts since the last answer
        self._thread: threading.Thread | None = None
        self._hosts = [self._start(index) for index in range(config.hosts)]

    def __enter__(self) -> Self:
        """Wait for the first host.

        Raises:
            UserError: the verifier cannot be loaded there.
            RunError: hosts are lost again and again.
        """
        try:
            while not any(host.serving for host in self._hosts):
                self._round()
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name="rolltree-reward-hosts", daemon=True)
        self._thread.start()
        return self

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Return the verdict on every item, in the order given.

        Raises:
            UserError: a verifier process had to be replaced and the verifier no longer loads.
            RunError: hosts are lost again and again.
            ValueError: the hosts are closed.
        """
        return self.ask("score", items).result()

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        return self.ask("check", entries).result()

    def ask(self, method: str, values: Sequence[Any]) -> Future[list[Any]]:
        """Call ``score`` or ``check`` without waiting; the future has the answers in the order of ``values``."""
        call = _Call(method, values)
        with self._lock:
            if self._error is not None:
                raise self._error
            if not values:
                call.future.set_result([])
                return call.future
            self._new.put(call)
            settle(self._news)
        return call.future

    def close(self) -> None:
        """Kill the hosts, which ends their verifiers."""
        self._fail(ValueError("The reward hosts are closed; make others."))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for host in self._hosts:
            host.worker.kill()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._error is None:
                self._round()
        except Exception as error:
            self._fail(error)
        calls = {chunk.call for host in self._hosts for chunk in host.chunks.values()}
        calls |= {chunk.call for chunk in self._waiting}
        while not self._new.empty():
            calls.add(self._new.get())
        for call in calls:
            settle(call.future, error=self._error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            settle(self._news)

    def _round(self) -> None:
        """Wait for news or an answer; then collect answers, replace lost hosts, and hand out chunks."""
        answers = [future for host in self._hosts for future in host.futures()]
        self._workers.wait([self._news, *answers], LOOK_S)
        with self._lock:
            if self._news.done():
                self._news = Future()
        while not self._new.empty():
            self._waiting += self._cut(self._new.get())
        for host in list(self._hosts):
            try:
                self._read(host)
                self._look_after(host)
            except LostError as error:
                self._replace(host, str(error).rstrip("."))
        self._dispatch()

    def _cut(self, call: _Call) -> Iterator[_Chunk]:
        """Yield the chunks of a call, about four for each host."""
        count = len(call.values)
        size = max(self._smallest, min(LARGEST, math.ceil(count / (4 * len(self._hosts)))))
        return (_Chunk(call, start, call.values[start : start + size]) for start in range(0, count, size))

    def _read(self, host: _Host) -> None:
        """Take the answers of a host.

        Raises:
            LostError: the host is no more.
            UserError: the verifier cannot be loaded there.
        """
        if host.facts is not None and host.facts.done():
            self.note, host.pid = host.facts.result()
            host.facts, host.serving = None, True
        for future in [future for future in host.chunks if future.done()]:
            error = future.exception()
            if isinstance(error, LostError) and not isinstance(error, GoneError):  # which is about a text
                raise error
            chunk, self._lost = host.chunks.pop(future), 0
            if error is None:
                chunk.call.settle(chunk.start, future.result())
            else:
                settle(chunk.call.future, error=error)

    def _look_after(self, host: _Host) -> None:
        """Ask whether a host answers.

        Raises:
            LostError: it takes too long to start, to answer, or to judge.
        """
        now = self._workers.clock()
        limit = self._hang_s if host.serving else self._start_s
        if host.facts is not None and now - host.asked_at > limit:
            what = "gave no answer (placement.hang_s)" if host.serving else "did not start (placement.start_s)"
            raise LostError(f"it {what} within {limit:g} s")
        if any(now > chunk.late for chunk in host.chunks.values()):
            raise LostError("it judged no longer although it answers (reward.timeout_s, placement.hang_s)")
        if host.facts is None and now - host.asked_at >= HEALTH_S:
            host.facts, host.asked_at = host.worker.ask("facts"), now

    def _start(self, index: int) -> _Host:
        worker = self._workers.start("reward", index, self._make, *self._args)
        return _Host(index, worker, worker.ask("facts"), self._workers.clock())

    def _replace(self, host: _Host, why: str) -> None:
        """Kill a host and start another in its place; its items are asked elsewhere, and first."""
        host.worker.kill()
        self._lost += 1
        again = list(host.chunks.values())
        for chunk in again:
            chunk.lost += 1
            self.asked_again += len(chunk.values)
        if (most := max([self._lost, *(chunk.lost for chunk in again)])) > self._restarts:
            raise RunError(
                f"{most} reward hosts were lost without an answer (placement.restarts = {self._restarts}), the last "
                f"because {why}; look into the logs of Ray (/tmp/ray/session_latest/logs)."
            )
        self._waiting.extendleft(reversed(again))
        self._hosts[host.index] = self._start(host.index)

    def _dispatch(self) -> None:
        while self._waiting:
            free = [host for host in self._hosts if host.serving and len(host.chunks) < AHEAD]
            if not free:
                return
            host, chunk = min(free, key=lambda host: (host.load, host.index)), self._waiting.popleft()
            host.chunks[host.worker.ask(chunk.call.method, chunk.values)] = chunk
            chunk.late = self._workers.clock() + self._hang_s + self._each_s * host.load
