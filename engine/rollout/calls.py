"""Calls of tools and judges in threads, concurrent with sampling: a bounded number at a time, each with a time limit.

A thread cannot be killed, so a call that exceeds its time limit fails and its thread is abandoned: it occupies no
place, its result is ignored, and as a daemon it does not keep the process from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

AT_ONCE = 64


class _Call(NamedTuple):
    future: Future[Any]
    timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class CallPool:
    """Runs calls in threads; only the thread that made the pool submits and expires."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
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

    def _start(self) -> None:
        while self._waiting and len(self._deadline) < self._at_once:
            waiting = self._waiting.popleft()
            self._deadline[waiting.future] = (time.monotonic() + waiting.timeout_s, waiting.timeout_s)
            threading.Thread(target=self._run, args=(waiting,), name="rolltree-call", daemon=True).start()

    def _run(self, waiting: _Call) -> None:
        result, error = None, None
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
