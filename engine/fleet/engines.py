"""The engines of a `Fleet`: what each has been asked, which of them have news, and which has the least to do.

A round of the fleet costs what has changed since the last one, not what is open: futures put their engine in a queue
when they are done, and the least loaded engine is at the top of a heap.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..rewards import RewardItem, RewardResult
from ..rollout.sampler import Flight
from .host import Facts, Health
from .questions import Question
from .workers import LostError, Worker, settle

Judge = Callable[[Sequence[RewardItem]], Future[list[RewardResult]]]
HEALTH_S = 5.0
"""Seconds between two questions about an engine's health."""


@dataclass(eq=False)
class Engine:
    """A worker and what it has been asked."""

    index: int
    worker: Worker
    news: News
    asked_at: float
    """Time of the newest question about its health; before it serves, of its start or of the load."""
    facts: Future[Facts] | None = None
    """Unanswered while it starts."""
    pid: int | None = None
    arrival: Future[int] | None = None
    """Load with which it comes to serving."""
    serving: bool = False
    leaving: bool = False
    """Its node is to leave."""
    jobs: dict[int, tuple[Flight, Future[Any]]] = field(default_factory=dict)
    load: int = 0
    """Number of responses in flight."""
    ended: deque[int] = field(default_factory=deque)
    """Jobs that have ended and were not read; some may have been dropped."""
    commands: dict[Future[Any], float] = field(default_factory=dict)
    """Unanswered calls whose answers say nothing, and their times."""
    health: Future[Health] | None = None
    questions: Future[list[Question]] | None = None
    """The programs' next ones."""
    verdicts: dict[Future[list[RewardResult]], list[int]] = field(default_factory=dict)
    """The questions' numbers by the call that judges their answers."""
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def takes_jobs(self) -> bool:
        return self.serving and not self.leaving

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the worker's object; its answer is news."""
        future = self.worker.ask(method, *args)
        self.news.expect(future, self)
        return future

    def ask(self, now: float, method: str, *args: Any) -> None:
        """Call a method whose answer says nothing."""
        self.commands[self.call(method, *args)] = now

    def pass_questions(self, judge: Judge | None) -> None:
        """Hand the programs' questions to the run's verifier, and its answers back; without one they have their own."""
        if judge is None:
            return
        if self.questions is not None and self.questions.done():
            new, self.questions = self.questions.result(), None
            verdicts = judge([RewardItem(question.text, question.context) for question in new])
            self.verdicts[verdicts] = [question.number for question in new]
            self.news.expect(verdicts, self)
        if self.questions is None:
            self.questions = self.call("questions")
        for future in [future for future in self.verdicts if future.done()]:
            values = [result.value for result in future.result()]
            self.worker.ask("answer", dict(zip(self.verdicts.pop(future), values, strict=True)))

    def look_after(self, now: float, *, hang_s: float, start_s: float) -> None:
        """Ask for its health from time to time; arguments as for `Fleet`.

        Raises:
            LostError: it takes too long to start, to load weights, to answer, or to take a step.
        """
        if not self.serving:
            if now - self.asked_at > start_s:
                raise LostError(f"it did not start and load the weights within {start_s:g} s (placement.start_s)")
            return
        if self.commands and now - min(self.commands.values()) > start_s:
            raise LostError(f"it did not load the weights within {start_s:g} s (placement.start_s)")
        if self.health is None:
            if now - self.asked_at >= HEALTH_S:
                self.health, self.asked_at = self.call("health"), now
            return
        if self.health.done():
            health = self.health.result()
            self.health, self.tally = None, health.tally
            if not health.alive or health.idle_s > hang_s:
                raise LostError(f"it took no step for {health.idle_s:.0f} s while it had work (placement.hang_s)")
        elif now - self.asked_at > hang_s:
            raise LostError(f"it gave no answer for {now - self.asked_at:.0f} s (placement.hang_s)")

    def reserve(self, flight: Flight) -> None:
        """Count the responses of a job that it will be given."""
        self.load += flight.job.params.n

    def add(self, number: int, flight: Flight, future: Future[Any]) -> None:
        """Wait for the result of a job that it has been given; ``future`` gets it, with a reference where it stays."""
        self.jobs[number] = flight, future
        future.add_done_callback(lambda _: self.ended.append(number))
        self.news.expect(future, self)

    def remove(self, number: int) -> None:
        """Forget a job."""
        flight, _ = self.jobs.pop(number)
        self.load -= flight.job.params.n

    def take_ended(self) -> list[int]:
        """Return the jobs that have ended since the last call, the first given first."""
        numbers = [self.ended.popleft() for _ in range(len(self.ended))]
        return sorted(number for number in numbers if number in self.jobs)


class News:
    """The engines with an answer that has not been read; answers may arrive in other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: deque[Engine] = deque()
        self.any: Future[None] = Future()
        """Done if there is an answer."""

    def expect(self, future: Future[Any], engine: Engine) -> None:
        """Let the answer in ``future`` be news of ``engine``."""
        future.add_done_callback(partial(self._arrived, engine))

    def _arrived(self, engine: Engine, _: Future[Any]) -> None:
        with self._lock:
            self._engines.append(engine)
            settle(self.any)

    def take(self) -> list[Engine]:
        """Return the engines with news, each once and in the order of their numbers; forget them."""
        with self._lock:
            if not self._engines:
                return []
            engines, self._engines, self.any = self._engines, deque(), Future()
        return sorted(set(engines), key=lambda engine: engine.index)


class LeastLoaded:
    """Finds the engine that takes jobs with the fewest responses in flight, of several the first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Engine]] = []  # load, index, number of the entry
        self._entries = 0
        self._most = 64  # entries at which those that no longer hold are removed

    def changed(self, engine: Engine) -> None:
        """Note that the load of a serving engine has changed, or that it takes jobs from now on."""
        self._entries += 1
        heapq.heappush(self._heap, (engine.load, engine.index, self._entries, engine))
        if len(self._heap) > self._most:
            self._heap = list({entry[3]: entry for entry in self._heap if _holds(entry)}.values())
            heapq.heapify(self._heap)
            self._most = 64 + 4 * len(self._heap)

    def find(self) -> Engine | None:
        """Return that engine; None if no engine takes jobs."""
        while self._heap and not _holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None


def _holds(entry: tuple[int, int, int, Engine]) -> bool:
    load, _, _, engine = entry
    return engine.takes_jobs and engine.load == load
