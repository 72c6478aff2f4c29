"""Calls of tools and judges in threads, concurrent with sampling: a bounded number at a time, each with a time limit.

A thread cannot be killed, so a call that exceeds its time limit fails and its thread is abandoned: it occupies no
place, its result is ignored, and as a daemon it does not keep the process from ending. A call that only waits
(`engine/parts/waiting.py`) gives up its place meanwhile, and its time limit stands still.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ..parts.waiting import PLACE
from ..programs.program import BranchId
from .branch import Request

AT_ONCE = 64


def due(request: Request) -> Iterable[tuple[BranchId, Future[Any]]]:
    """Return the calls of a request of which one is passed to its program next."""
    return request.calls if request.program.takes_any_order else islice(request.calls, 1)


def take(request: Request) -> tuple[BranchId, Future[Any]] | None:
    """Take the first finished one of these calls out of the request; None if none has finished."""
    landed = next((called for called in due(request) if called[1].done()), None)
    if landed is not None:
        request.calls.remove(landed)
    return landed


class _Call(NamedTuple):
    future: Future[Any]
    timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Returning(NamedTuple):
    """A call that has waited, and goes on when it has a place again."""

    future: Future[Any]
    left_s: float
    timeout_s: float
    placed: threading.Event


class CallPool:
    """Runs calls in threads; only the thread that made the pool submits and expires."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._returning: deque[_Returning] = deque()
        self._deadline: dict[Future[Any], tuple[float, float]] = {}  # running calls: deadline and time limit, seconds

    def submit(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` when a place is free; the time limit counts from then on."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append(_Call(future, timeout_s, function, arguments))
            self._start()
        return future

    def expire(self) -> None:
        """Fail the calls that have exceeded their time limit."""
        now = time.monotonic()
        with self._lock:
            late = [(future, limit) for future, (deadline, limit) in self._deadline.items() if now >= deadline]
            for future, _ in late:
                del self._deadline[future]
            self._start()
        for future, limit in late:
            future.set_exception(TimeoutError(f"A call did not return within its {limit:g} s"))

    @contextmanager
    def _aside(self, future: Future[Any]) -> Iterator[None]:
        """Give up the place of a running call within the block, and wait for one at its end.

        Raises:
            TimeoutError: the call has exceeded its time limit.
        """
        with self._lock:
            deadline, limit = self._deadline.pop(future, (0.0, 0.0))
            if not limit:
                raise TimeoutError("The call was given up")
            again = _Returning(future, deadline - time.monotonic(), limit, threading.Event())
            self._start()
        try:
            yield
        finally:
            with self._lock:
                self._returning.append(again)
                self._start()
            again.placed.wait()

    def _start(self) -> None:
        while self._returning and len(self._deadline) < self._at_once:
            again = self._returning.popleft()
            self._deadline[again.future] = (time.monotonic() + again.left_s, again.timeout_s)
            again.placed.set()
        while self._waiting and len(self._deadline) < self._at_once:
            waiting = self._waiting.popleft()
            self._deadline[waiting.future] = (time.monotonic() + waiting.timeout_s, waiting.timeout_s)
            threading.Thread(target=self._run, args=(waiting,), name="rolltree-call", daemon=True).start()

    def _run(self, waiting: _Call) -> None:
        result, error = None, None
        PLACE.set(partial(self._aside, waiting.future))
        try:
            result = waiting.function(*waiting.arguments)
        except BaseException as raised:
            error = raised
        with self._lock:
            if self._deadline.pop(waiting.future, None) is None:
                return  # expired before
            self._start()
        if error is None:
            waiting.future.set_result(result)
        else:
            waiting.future.set_exception(error)
