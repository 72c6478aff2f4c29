"""Processes that work for a run: rollout engines, ranks of the trainer, reward hosts; and threads in their place.

A worker is an object that `Workers.start` makes elsewhere. `Worker.ask` calls a method of it and returns a future. The
calls of one worker run one after the other, in the order in which they were asked. A method may return a future of its
own: the answer is then that future's, and the next call does not wait for it. `rolltree.engine.fleet.ray` makes
workers that are processes; `InThreads` makes threads of this process.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, Protocol

from ..errors import ElsewhereError

Role = Literal["rank", "engine", "reward"]


class Room(Enum):
    """The state of one worker's place in a cluster that grows and shrinks; see `rolltree.engine.fleet.rooms`."""

    FOUND = "found"
    LEAVING = "leaving"
    """Its node takes no new work and is to leave."""
    NONE = "none"


class LostError(ElsewhereError, RuntimeError):
    """The worker has ended, or was killed, before it answered."""


class GoneError(LostError):
    """A stored value is no more, because the process that stored it has ended."""


class Reference(Protocol):
    """A value that `Workers.put` stored once for all workers; it may be part of the arguments of `Worker.ask`."""

    def get(self) -> Any:
        """Return the value; arrays in it are read-only.

        Raises:
            GoneError: the process that stored it has ended.
        """
        ...


class Worker(Protocol):
    """A started worker."""

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call ``method`` of the worker's object.

        The future raises the error of the method, or of making the object, and `LostError` if the worker ends first.
        """
        ...

    def kill(self) -> None:
        """End the worker at once; the futures of all its unanswered calls raise `LostError`."""
        ...


class Workers(Protocol):
    """Starts workers and waits for them."""

    def start(self, role: Role, index: int, make: Callable[..., object], *args: Any) -> Worker:
        """Start a worker whose object is ``make(*args)``, without waiting for it.

        Args:
            role: kind of work, which decides the resources.
            index: number of the worker among those of its role; a worker may be started again after its end.
            make: function or class that can be imported in another process.
        """
        ...

    def put(self, value: Any) -> Reference:
        """Store a copy of ``value`` that any number of workers can read; a worker that is given this function stores
        by itself."""
        ...

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        """Wait until one of ``futures`` is done, at most ``seconds``; return those that are done."""
        ...

    def leave(self, worker: Worker, method: str, *args: Any) -> Future[tuple[Any, Reference]]:
        """Call a worker's method that returns a pair, as `Worker.ask` does; the second value stays where it is, and
        outlives the worker."""
        ...

    def rooms(self, role: Role, count: int) -> list[Room]:
        """Return whether there is room for each of ``count`` workers of a role, by their numbers."""
        ...

    def clock(self) -> float:
        """Return the time in seconds since some moment."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class Calls:
    """The object of a worker, in the worker's process, and the thread that runs its calls in order."""

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        self._thread = ThreadPoolExecutor(1, "rolltree-worker")
        self._object = self._thread.submit(make, *args)

    def ask(self, answer: Future[Any], method: str, args: tuple[Any, ...]) -> None:
        """Call a method as `Worker.ask` does, and set its ``answer``."""
        self._thread.submit(self._run, answer, method, args)

    def close(self) -> None:
        """Let no further call begin."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, answer: Future[Any], method: str, args: tuple[Any, ...]) -> None:
        try:
            result = getattr(self._object.result(), method)(*args)
        except BaseException as error:
            settle(answer, error=error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(_pass_on, answer))
        else:
            settle(answer, result)


def settle(answer: Future[Any], value: Any = None, *, error: BaseException | None = None) -> None:
    """Set the result or the error of a future, unless it has one."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def _pass_on(
    answer: Future[Any], done: Future[Any], told: Callable[[BaseException], BaseException] = lambda error: error
) -> None:
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        settle(answer, error=told(error))
    else:
        settle(answer, done.result())


def left(workers: Workers, answer: Future[tuple[Any, Any]]) -> Future[tuple[Any, Reference]]:
    """Return a future of ``answer`` whose second value ``workers`` stores: `Workers.leave` where memory is shared."""
    stored: Future[tuple[Any, Reference]] = Future()

    def store(done: Future[tuple[Any, Any]]) -> None:
        if (error := done.exception()) is not None:
            settle(stored, error=error)
            return
        told, stays = done.result()
        settle(stored, (told, workers.put(stays)))

    answer.add_done_callback(store)
    return stored


class AskedWorker(ABC):
    """A worker that keeps its unanswered calls: they fail when it is killed, and what it answers later is discarded."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._count = 0
        self._killed = False

    def ask(self, method: str, *args: Any) -> Future[Any]:
        return self._begin(self._send, method, args)

    def _begin(self, send: Callable[..., Future[Any]], method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Start a call with ``send``, whose arguments are those of `_send`; return its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._killed:
                answer.set_exception(LostError(f"{self._name} was killed."))
                return answer
            self._open.add(answer)
            number, self._count = self._count, self._count + 1
        send(number, method, args).add_done_callback(partial(self._answered, answer))
        return answer

    def kill(self) -> None:
        with self._lock:
            self._killed, lost, self._open = True, self._open, set()
        self._end()
        for answer in lost:
            settle(answer, error=LostError(f"{self._name} was killed."))

    @abstractmethod
    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Start a call, the ``number``-th of this worker from 0."""

    @abstractmethod
    def _end(self) -> None:
        """End the worker at once."""

    def _told(self, error: BaseException) -> BaseException:
        """Return the error that a caller gets for that of a call."""
        return error

    def _answered(self, answer: Future[Any], done: Future[Any]) -> None:
        with self._lock:
            if answer not in self._open:  # killed
                return
            self._open.remove(answer)
        _pass_on(answer, done, self._told)


@dataclass(frozen=True)
class _Held:
    value: Any

    def get(self) -> Any:
        return self.value


class InThreads:
    """Workers that are threads of this process. A killed one may still compute; its answers are discarded."""

    def __init__(self) -> None:
        self._started: list[_InThread] = []

    def start(self, role: Role, index: int, make: Callable[..., object], *args: Any) -> Worker:
        worker = _InThread(f"{role} {index}", Calls(make, *args))
        self._started.append(worker)
        return worker

    @staticmethod
    def put(value: Any) -> Reference:
        return _Held(value)

    def leave(self, worker: Worker, method: str, *args: Any) -> Future[tuple[Any, Reference]]:
        return left(self, worker.ask(method, *args))

    def rooms(self, role: Role, count: int) -> list[Room]:
        return [Room.FOUND] * count

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        return set(wait(futures, seconds, FIRST_COMPLETED).done)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        for worker in self._started:
            worker.kill()


class _InThread(AskedWorker):
    def __init__(self, name: str, calls: Calls) -> None:
        super().__init__(name)
        self._calls = calls

    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> Future[Any]:
        done: Future[Any] = Future()
        self._calls.ask(done, method, args)
        return done

    def _end(self) -> None:
        self._calls.close()
