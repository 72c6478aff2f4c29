"""Answers that clients fetch by the id of their request: kept in memory, and gone when the process ends.

An id is a function of the session, the model or sampler, and the client's sequence number, so a request that is sent
again, because its reply was lost, finds the future of the first one and is not carried out twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fleet.host import sentence
from .faults import FaultError

MOST_WAITING = 4096
"""Most unfinished requests of a server."""
MOST_BYTES = 1 << 30
"""Most bytes of the bodies of unfinished requests."""
KEPT_S = 3600.0
"""Seconds for which an answer can be fetched."""
FETCHED_S = 60.0
"""Seconds for which it is kept after it was fetched, in case the reply was lost."""
CANCELLED = "The request was cancelled."
log = logging.getLogger("rolltree.tinker")

Reply = Mapping[str, Any] | bytes
"""An answer: JSON, or bytes of the client's protobuf."""


@dataclass
class Future:
    """The answer to a request.

    Attributes:
        owner: the client that may fetch it.
        size: bytes of the request's body.
        reply: the answer once it is there; a failure is one too.
        extra: fields of the promise besides its id.
        task: computes the answer, if it has a task of its own, which a client can cancel.
    """

    id: str
    owner: str
    size: int
    extra: dict[str, Any] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Reply | None = None
    at: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def promise(self) -> dict[str, Any]:
        """The reply to the request itself."""
        return {"request_id": self.id, **self.extra}


class Futures:
    """The futures of a server; all methods are called in the event loop."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._finished: dict[str, Future] = {}  # the oldest first
        self._bytes = 0
        self.answered: Counter[str] = Counter()  # requests by what became of them: ok, user, server

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of unfinished requests."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """The number of unfinished requests."""
        return len(self._futures) - len(self._finished)

    def find(self, request_id: str, owner: str) -> Future | None:
        """Return the future of a request that was sent before."""
        future = self._futures.get(request_id)
        return future if future is not None and future.owner == owner else None

    def open(self, request_id: str, owner: str, size: int, **extra: Any) -> Future:
        """Return a new future.

        Raises:
            FaultError: too many requests are unfinished; the client comes again.
        """
        self._prune()
        if self.waiting >= MOST_WAITING or self._bytes + size > MOST_BYTES:
            raise FaultError(f"{self.waiting} requests wait already; send this one again later.", 429)
        future = self._futures[request_id] = Future(request_id, owner, size, extra)
        self._bytes += size
        return future

    def settle(self, future: Future, reply: Reply) -> None:
        """Give a future its answer."""
        if future.done.is_set():
            return
        future.reply, future.at = reply, time.monotonic()
        self._bytes -= future.size
        self.answered["ok" if isinstance(reply, bytes) else reply.get("category", "ok")] += 1
        self._finished[future.id] = future
        future.done.set()

    async def run(self, future: Future, work: Coroutine[Any, Any, Reply]) -> None:
        """Settle a future with the result of ``work``, or with its error."""
        try:
            self.settle(future, await work)
        except FaultError as fault:
            self.settle(future, failure(str(fault), "user"))
        except asyncio.CancelledError:
            self.settle(future, failure(CANCELLED, "user"))
            raise
        except Exception as error:
            log.error("A request of a client failed.", exc_info=error)
            self.settle(future, failure(f"{sentence(error)}.", "server"))

    def once(self, name: str, owner: str, size: int, work: Coroutine[Any, Any, Reply], **extra: Any) -> Future:
        """Return the future of a request without a place in an order, which is begun unless it was before."""
        earlier = self.find(f"{name}:0", owner)
        if earlier is not None:
            work.close()
            return earlier
        try:
            future = self.open(f"{name}:0", owner, size, **extra)
        except FaultError:
            work.close()
            raise
        self.start(future, work)
        return future

    def start(self, future: Future, work: Coroutine[Any, Any, Reply]) -> None:
        """Run ``work`` in a task of its own."""
        future.task = asyncio.get_running_loop().create_task(self.run(future, work))

    def cancel(self, request_id: str, owner: str) -> None:
        """Stop a request that has a task of its own; others, and finished ones, stay as they are."""
        future = self.find(request_id, owner)
        if future is not None and future.task is not None and not future.done.is_set():
            self.settle(future, failure(CANCELLED, "user"))  # a task that has not begun ends without a word
            future.task.cancel()

    async def wait(self, request_id: str, owner: str, seconds: float) -> Future:
        """Return a future, after up to ``seconds`` if it has no answer yet.

        Raises:
            FaultError: there is none; the client sends the request again.
        """
        future = self.find(request_id, owner)
        if future is None:
            raise FaultError("There is no such request; it was answered long ago or lost when the server ended.", 410)
        try:
            await asyncio.wait_for(future.done.wait(), seconds)
        except TimeoutError:
            return future
        asyncio.get_running_loop().call_later(FETCHED_S, self._drop, future.id)
        return future

    def _prune(self) -> None:
        before = time.monotonic() - KEPT_S
        while self._finished and next(iter(self._finished.values())).at < before:
            self._drop(next(iter(self._finished)))

    def _drop(self, request_id: str) -> None:
        self._futures.pop(request_id, None)
        self._finished.pop(request_id, None)


def failure(message: str, category: str) -> dict[str, Any]:
    """Return the answer to a request that failed, as the client's `RequestFailedResponse`."""
    return {"error": message, "category": category}
