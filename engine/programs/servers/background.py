"""The event loop of all clients of servers, in a thread of its own.

A session of a server belongs to one event loop for as long as it lasts, and a step of an environment has another one,
or none. So sessions live here, and steps run coroutines here and wait for their results.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from ...parts.waiting import waiting

T = TypeVar("T")
END_S = 4.0
"""Seconds in which all sessions must have ended when the loop is closed, and then again after they are cancelled."""


class Background:
    """An event loop in a thread that starts with its first coroutine; a process has one, `BACKGROUND`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ends: list[Callable[[], object]] = []

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` in the loop."""
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="rolltree-servers", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Return the result of ``work``, which is cancelled after ``seconds``.

        Raises:
            TimeoutError: it took longer.
        """
        future = self.start(work)
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    def wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result as `run` does, in a call of a program, which takes no place of other calls meanwhile."""
        with waiting():
            return self.run(work, seconds)

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, which is cancelled with the task that waits for it, in whichever loop."""
        return await asyncio.wrap_future(self.start(work))

    def at_end(self, end: Callable[[], object]) -> None:
        """Call ``end`` when the loop is closed."""
        self._ends.append(end)

    def close(self) -> None:
        """End all sessions and what was started for them; the loop starts again with the next coroutine."""
        for end in self._ends:
            end()
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None or not thread.is_alive():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end_all(), loop).result(2 * END_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_S)


async def _end_all() -> None:
    """Wait for the ends of all tasks of the loop but this one, and cancel those that take long."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=END_S)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


BACKGROUND = Background()
atexit.register(BACKGROUND.close)
