"""Workers on a virtual clock: models of rollout engines and reward hosts for `Fleet` and `Controller`.

The clock moves only while the run waits: `VirtualWorkers.wait` goes from event to event until one of them has answered
a call. An event is the end of some decode steps, of a load of weights, of a verdict, of a start, or of a worker. All
code runs in the caller's thread, and ties are broken by the order in which events were planned, so the same seed gives
the same run.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from ..data.tree import TokenTree
from ..fleet.host import Facts, Health, Result
from ..fleet.workers import LostError, Reference, Role, Room, Worker, left, settle
from ..prompts.group import Group, Responses
from ..rewards import Rewards
from ..rollout.sampler import Job
from .modelled import Batch, EngineModel, Load, Times

Lengths = Callable[[int, int], Sequence[int]]
"""Returns the lengths in tokens of ``n`` responses to a job, given its seed and ``n``."""


class VirtualWorkers:
    """`Workers` whose objects are models in this thread, on a clock of their own.

    Args:
        look_s: the driver sees answers at multiples of this many seconds, all of that time at once, and waits no less;
            0: immediately. Large runs are simulated faster with fewer rounds of the driver.
        failures: ends of each engine in a second.
        seed: decides when engines end.

    Attributes:
        ended: engines that have ended.
    """

    def __init__(self, look_s: float = 0.0, failures: float = 0.0, seed: int = 0) -> None:
        self._look_s, self._failures = look_s, failures
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._limit = math.inf
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._planned = 0
        self._answered = False
        self.ended = 0

    def start(self, role: Role, index: int, make: Callable[..., object], *args: Any) -> Worker:
        """See `Workers.start`; ``make`` is called at once, with these workers as its first argument."""
        worker = _VirtualWorker(self, f"{role} {index}", make(self, *args))
        if role == "engine" and self._failures:
            self.after(self._random.exponential(1 / self._failures), partial(self._end, worker))
        return worker

    def _end(self, worker: _VirtualWorker) -> None:
        self.ended += worker.lose("has ended")

    @staticmethod
    def put(value: Any) -> Reference:
        return _Held(value)

    def leave(self, worker: Worker, method: str, *args: Any) -> Future[tuple[Any, Reference]]:
        return left(self, worker.ask(method, *args))

    def rooms(self, role: Role, count: int) -> list[Room]:
        return [Room.FOUND] * count

    def clock(self) -> float:
        return self._now

    def close(self) -> None:
        self._events.clear()

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Plan ``event``."""
        self._planned += 1
        heapq.heappush(self._events, (self._now + seconds, self._planned, event))

    def answer(self, future: Future[Any], value: Any = None, *, error: Exception | None = None) -> None:
        """Settle a future, for which the driver may be waiting."""
        settle(future, value, error=error)
        self._answered = True

    @contextmanager
    def until(self, time: float) -> Iterator[None]:
        """Let no wait within the block go beyond ``time``."""
        before, self._limit = self._limit, min(self._limit, time)
        try:
            yield
        finally:
            self._limit = before

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        """See `Workers.wait`: move the clock to the next answer, of whichever future.

        Raises:
            RuntimeError: nothing will ever happen.
        """
        if seconds != 0 and not self._answered:
            self._go_on(math.inf if seconds is None else max(seconds, self._look_s))
        self._answered = False
        return {future for future in futures if future.done()}

    def _go_on(self, seconds: float) -> None:
        end = min(self._limit, self._now + seconds)
        if end == math.inf and not self._events:
            raise RuntimeError("The simulation waits for an event, and none is planned.")
        while self._events and self._events[0][0] <= end:
            self._now, _, event = heapq.heappop(self._events)
            event()
            if self._answered:
                seen = self._now if self._look_s == 0 else self._look_s * math.ceil(self._now / self._look_s)
                end = max(self._now, min(end, seen))
        if end < math.inf:
            self._now = end


class _Held:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class _VirtualWorker:
    def __init__(self, workers: VirtualWorkers, name: str, thing: Any) -> None:
        self._workers, self._name, self._thing = workers, name, thing
        self._open: dict[Future[Any], None] = {}
        self._lost: str | None = None

    def ask(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._lost is not None:
            answer.set_exception(LostError(f"{self._name} {self._lost}."))
            return answer
        result = getattr(self._thing, method)(*args)
        if not isinstance(result, Future):
            answer.set_result(result)
            return answer
        self._open[answer] = None
        result.add_done_callback(partial(self._pass_on, answer))
        return answer

    def _pass_on(self, answer: Future[Any], done: Future[Any]) -> None:
        if answer in self._open:
            del self._open[answer]
            settle(answer, done.result())

    def kill(self) -> None:
        self.lose("was killed")

    def lose(self, how: str) -> bool:
        """End the worker, whose unanswered calls fail; return False if it had ended before."""
        if self._lost is not None:
            return False
        self._lost, lost, self._open = how, self._open, {}
        self._thing.stop()
        for answer in lost:
            self._workers.answer(answer, error=LostError(f"{self._name} {how}."))
        return True


class HostModel:
    """A rollout engine and its `Host`: an `EngineModel` whose steps take the seconds of ``times``.

    As in `Host`, the jobs of an admission begin when the weights have their version, and new weights are fetched while
    the engine samples and used from the next step on.

    Args:
        workers: has the clock.
        times: seconds of the engine's steps.
        lengths: lengths of responses.
        prompt: tokens of each prompt.
        rows: rows of a full batch.
        start_s: seconds until the engine has started.
        load_s: seconds in which it fetches weights.
        busy: counts ``s``, the seconds of steps, ``steps``, and ``rows`` that sampled, of all hosts that share it.
    """

    def __init__(
        self,
        workers: VirtualWorkers,
        times: Times,
        lengths: Lengths,
        prompt: int,
        rows: int,
        start_s: float,
        load_s: float,
        busy: Counter[str],
    ) -> None:
        self._workers, self._times, self._draw = workers, times, lengths
        self._start_s, self._load_s, self._busy = start_s, load_s, busy
        self._jobs: dict[int, Job] = {}
        self._drawn: dict[int, Sequence[int]] = {}
        self._began: dict[int, int] = {}  # version of the weights when a job began
        self.engine = EngineModel(Batch(prompt, rows, self._drawn.__getitem__))
        self.version = 0
        self._futures: dict[int, Future[Result]] = {}
        self._waiting: list[Mapping[int, Job]] = []  # admissions
        self._loaded: deque[tuple[Future[int], int, bool]] = deque()  # fetched, not used yet
        self._chunk: tuple[Load, int, float] | None = None  # steps that it computes, their number and beginning
        self._plan = 0  # number of the planned end; those of earlier plans are void
        self._stopped = False

    # -- what `Fleet` asks ------------------------------------------------------------------------------------------

    def facts(self) -> Future[Facts]:
        started: Future[Facts] = Future()
        self._workers.after(self._start_s, partial(self._workers.answer, started, Facts(None, [0], 0)))
        return started

    def health(self) -> Health:
        return Health(self.version, 0.0, None, True, Counter())

    def run(self, jobs: Mapping[int, Job], held_out: bool = False) -> None:
        self._futures |= {number: Future() for number in jobs}
        self._waiting.append(jobs)
        self._look()

    def result(self, number: int) -> Future[Result]:
        return self._futures[number]

    def load(self, buckets: Sequence[Any], version: int, keep_keys: bool) -> Future[int]:
        loaded: Future[int] = Future()
        self._workers.after(self._load_s, partial(self._fetched, loaded, version, keep_keys))
        return loaded

    def forget_prefixes(self) -> None:
        """Do nothing: no prompt comes twice."""

    def stop(self) -> None:
        self._stopped = True

    # -- steps ------------------------------------------------------------------------------------------------------

    def _fetched(self, loaded: Future[int], version: int, keep_keys: bool) -> None:
        if not self._stopped:
            self._loaded.append((loaded, version, keep_keys))
            self._look()

    def _look(self) -> None:
        """Take up commands after the present step, or at once if there is none."""
        if self._chunk is None:
            self._begin()
            return
        load, count, begin = self._chunk
        passed = self._workers.clock() - begin
        low, high = 1, count  # the smallest number of steps that end now or later
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._times.steps(load, middle) >= passed else (middle + 1, high)
        if low < count:
            self._chunk = load, low, begin
            self._plan_end(max(0.0, self._times.steps(load, low) - passed))

    def _begin(self) -> None:
        while self._loaded:
            loaded, self.version, keep_keys = self._loaded.popleft()
            if not keep_keys:
                self.engine.forget_keys()
            self._workers.answer(loaded, self.version)
        waiting, self._waiting = self._waiting, []
        for jobs in waiting:
            if any(job.version > self.version for job in jobs.values()):
                self._waiting.append(jobs)
                continue
            for number, job in jobs.items():
                self._jobs[number], self._began[number] = job, self.version
                self._drawn[number] = self._draw(job.seed, job.params.n)
                self.engine.add(number)
        if self.engine.busy:
            load, count = self.engine.next()
            self._chunk = load, count, self._workers.clock()
            self._plan_end(self._times.steps(load, count))

    def _plan_end(self, seconds: float) -> None:
        self._plan += 1
        self._workers.after(seconds, partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan or self._stopped:
            return
        assert self._chunk is not None
        load, count, begin = self._chunk
        self._chunk = None
        self._busy["s"] += self._workers.clock() - begin  # type: ignore[assignment]
        self._busy.update(steps=count, rows=count * load.rows)
        for number in self.engine.advance(count):
            self._jobs.pop(number)
            lengths = tuple(self.engine.forget(number))
            del self._drawn[number]
            tree = ModelledTree.of(lengths, self._began.pop(number))
            self._workers.answer(self._futures.pop(number), Result(tree, [""] * len(lengths), Counter()))
        self._begin()


class ModelledTree(TokenTree):
    """A tree of responses of which only the lengths are known: each leaf has one token."""

    @staticmethod
    def of(lengths: tuple[int, ...], version: int) -> ModelledTree:
        """Return a tree of responses with ``lengths``, all sampled by weights of ``version``."""
        tree = copy.copy(_leaves(len(lengths)))
        tree.columns, tree.rewards, tree.meta = dict(tree.columns), {}, {"lengths": lengths}
        tree.set("policy_version", version)
        return tree

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each response."""
        lengths: tuple[int, ...] = self.meta["lengths"]
        return lengths

    @property
    def sampled_tokens(self) -> int:
        return sum(self.lengths)


@cache
def _leaves(n: int) -> ModelledTree:
    tree = copy.copy(TokenTree.from_sequences([0], [[i + 1] for i in range(n)]))
    tree.__class__ = ModelledTree
    assert isinstance(tree, ModelledTree)
    return tree


class JudgingModel:
    """`Judging` by reward hosts on the virtual clock.

    Responses are judged in the order in which their groups finished, by ``processes`` at once.

    Args:
        seconds: time of one verdict.
        processes: verifier processes of all hosts.
    """

    in_turn = False

    def __init__(self, workers: VirtualWorkers, seconds: float, processes: int) -> None:
        self._workers, self._seconds, self._processes = workers, seconds, processes
        self._free_at = 0.0  # when all processes together have judged what is queued
        self._outstanding = 0  # groups
        self._judged: list[Group] = []

    @contextmanager
    def running(self, rewards: Rewards) -> Iterator[None]:
        """See `Judging.running`; ``rewards`` is not asked."""
        yield

    @property
    def busy(self) -> bool:
        """See `Judging.busy`."""
        return bool(self._outstanding or self._judged)

    def add(self, finished: Sequence[tuple[Group, TokenTree, list[str] | None]]) -> None:
        """See `Judging.add`."""
        now = self._workers.clock()
        for group, tree, _ in finished:
            group.parts.append(Responses(tree, [], {}))
            if self._seconds == 0:
                self._judged.append(group)
                continue
            self._free_at = max(now, self._free_at) + tree.num_leaves * self._seconds / self._processes
            self._outstanding += 1
            self._workers.after(max(self._free_at - now, self._seconds), partial(self._answer, group))

    def _answer(self, group: Group) -> None:
        self._outstanding -= 1
        self._judged.append(group)
        self._workers.answer(Future())  # the driver wakes up

    def wait(self, seconds: float) -> None:
        """See `Judging.wait`."""
        self._workers.wait([], seconds)

    def take(self, due: Sequence[Group] | None = None) -> list[Group]:
        """See `Judging.take`."""
        taken = set(self._judged if due is None else due)
        if not taken <= set(self._judged):
            return []
        self._judged = [group for group in self._judged if group not in taken]
        return sorted(taken, key=lambda group: group.ticket)

    def take_gone(self) -> list[Group]:
        """See `Judging.take_gone`."""
        return []

    def put_rewards(self, group: Group) -> None:
        """See `Judging.put_rewards`; there are none."""
