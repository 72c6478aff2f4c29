"""Steps a rollout engine in a thread of its own, for callers in other threads or processes.

    callers --commands--> thread: run jobs, load weights, call a function; step --> futures of the callers

No caller waits for a step. The commands run in the order in which they were given, between two steps. An error in a
step fails all unfinished jobs with it and is logged once; the thread continues.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from ..data.segment import Text
from ..data.stored import Sampled, StoredTree
from ..data.tree import TokenTree
from ..programs import RolloutProgram
from ..rollout.digest import Held
from ..rollout.engine import RolloutEngine
from ..rollout.local import LocalSampler
from ..rollout.packed import Bucket, Changes, unpack_changes, unpack_weights
from ..rollout.sampler import Array, Flight, Job, Kept
from .questions import Question, Questions

T = TypeVar("T")
PAUSE_S = 0.005
"""Seconds between polls of a paused engine."""
TURN_S = 0.05
"""Seconds after which no further command begins before a step, so that long ones of several clients leave it a turn."""
log = logging.getLogger("rolltree.host")


class Facts(NamedTuple):
    """The model's number of positions (None without a limit), its end-of-sequence tokens, and the engine's process."""

    longest: int | None
    end_token_ids: list[int]
    pid: int


class Health(NamedTuple):
    """The state of a `Host`.

    Attributes:
        version: policy version of the engine.
        idle_s: seconds since the last step or command while there is work to do; 0 without work.
        failing: sentence about the last step if it failed.
        alive: the thread runs.
        tally: see `Sampler.tally`.
    """

    version: int
    idle_s: float
    failing: str | None
    alive: bool
    tally: Counter[str]


class Result(NamedTuple):
    """A finished job: its tree, the texts of its leaves' responses, and the engine's tally."""

    tree: TokenTree
    texts: Sequence[str] | None
    tally: Counter[str]


class Host:
    """An engine with a thread that steps it while there is work; the thread starts at once.

    Args:
        engine: the engine; only the thread may call it from now on.
        program: steers the jobs of `run`; each job gets a copy.
        texts: decodes the responses of finished trees, so that the caller need not.
        asked: verifier of ``program``, if another process answers it.
        after_step: called in the thread after every step.
        failed: called in the thread with the error of a step that failed as a whole.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        program: str | RolloutProgram = "flat",
        texts: Callable[[Sequence[TokenTree]], list[list[str]]] | None = None,
        *,
        questions: Questions | None = None,
        after_step: Callable[[], object] = lambda: None,
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self.engine, self.sampler, self._texts = engine, LocalSampler(engine, program), texts
        self._after_step, self._failed = after_step, failed
        self._questions = Questions() if questions is None else questions
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._admissions: list[tuple[dict[int, Job], bool]] = []  # jobs that wait for their weights
        self._running: dict[Flight, int] = {}
        self._promised: dict[int, Future[Result]] = {}  # of unfinished jobs
        self._results: dict[int, Future[Result]] = {}  # not asked for yet
        self._tally: Counter[str] = Counter()
        self._fetching = ThreadPoolExecutor(1, "rolltree-weights")
        self._ending = self._working = False
        self._alive_at = time.monotonic()
        self._failing: str | None = None
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="rolltree-engine", daemon=True)
        self._thread.start()

    # -- called by any thread ---------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` in the thread between two steps."""
        future: Future[T] = Future()
        self._commands.put(partial(_settle, future, function))
        return future

    def run(self, jobs: Mapping[int, Job], held_out: bool = False) -> None:
        """Sample jobs, which begin together as soon as the weights have the versions that they name.

        Args:
            jobs: each with a number of its own, for `result`.
            held_out: answer as `Sampler.generate` does.
        """
        futures: dict[int, Future[Result]] = {number: Future() for number in jobs}
        self._promised |= futures
        self._results |= futures
        self._commands.put(partial(self._admissions.append, (dict(jobs), held_out)))

    def result(self, number: int) -> Future[Result]:
        """Return the result of a job of `run`; it can be asked for once."""
        return self._results.pop(number)

    def stored_result(self, number: int, tells_texts: bool) -> Future[tuple[Result, Sampled]]:
        """Return the result of a job with a `StoredTree`, and what was sampled.

        Args:
            tells_texts: the result has the texts too; otherwise an empty list stands for them.
        """
        stored: Future[tuple[Result, Sampled]] = Future()

        def store(done: Future[Result]) -> None:
            if done.cancelled():
                stored.cancel()
            elif (error := done.exception()) is not None:
                stored.set_exception(error)
            else:
                tree, texts, tally = done.result()
                told = texts if texts is None or tells_texts else []
                stored.set_result((Result(StoredTree.of(tree), told, tally), Sampled(tree, texts)))

        self.result(number).add_done_callback(store)
        return stored

    def load(
        self, buckets: Sequence[Bucket], version: int, keep_keys: bool = False, since: int | None = None
    ) -> Future[int]:
        """Fetch weights while the engine samples, then use them from the next step on; the future has their version.

        Weights are used in the order of the calls.

        Args:
            since: the version that the buckets hold the changes of; None if they hold whole tensors. The future fails
                if the engine has another one, and by `GoneError` if the buckets are no more.
        """
        loaded: Future[int] = Future()

        def use(weights: Mapping[str, Tensor | Changes]) -> int:
            if since is not None and self.engine.policy_version != since:
                raise RuntimeError(
                    f"The engine has the weights of version {self.engine.policy_version} and was sent the changes "
                    f"since version {since}; this is a defect of rolltree, please report it"
                )
            self.engine.update_weights(weights, version=version, keep_kv=keep_keys)
            return version

        def fetch() -> None:
            try:
                fetched = (bucket.get() for bucket in buckets)
                weights = unpack_weights(fetched) if since is None else unpack_changes(fetched)
            except BaseException as error:
                loaded.set_exception(error)
                return
            self._commands.put(partial(_settle, loaded, partial(use, weights)))

        self._fetching.submit(fetch)
        return loaded

    def kept(self, numbers: Sequence[int]) -> Future[list[Kept]]:
        """Return the present states of unfinished jobs, which continue; both parts are None for a finished one.

        They are copies: the jobs go on while the answer travels, and the parts of a program's state change with them.
        """

        def kept() -> list[Kept]:
            running = {number: flight for flight, number in self._running.items() if number in chosen}
            states = dict(zip(running, map(_copied, self.sampler.kept(list(running.values()))), strict=True))
            return [states.get(number, Kept(None, None)) for number in numbers]

        chosen = set(numbers)
        return self.call(kept)

    def drop(self, numbers: Sequence[int]) -> Future[None]:
        """Stop jobs and discard them."""

        def drop() -> None:
            self._admissions = [
                ({number: job for number, job in jobs.items() if number not in dropped}, held_out)
                for jobs, held_out in self._admissions
            ]
            flights = [flight for flight, number in self._running.items() if number in dropped]
            self.sampler.drop(flights)
            for flight in flights:
                del self._running[flight]
            for number in dropped & self._promised.keys():
                self._promised.pop(number).cancel()
                self._results.pop(number, None)

        dropped = set(numbers)
        return self.call(drop)

    def rest(self) -> Future[None]:
        """Free the device's memory until `wake`; unfinished jobs wait."""
        return self.call(partial(self.engine.sleep, weights=True))

    def wake(self) -> Future[None]:
        """Continue after `rest`."""
        return self.call(self.engine.wake)

    def let_go(self, owners: Sequence[int]) -> Future[None]:
        """See `Sampler.let_go`."""
        return self.call(partial(self.engine.let_go, owners))

    def forget_prefixes(self) -> Future[None]:
        """Drop the cached keys of prefixes."""
        return self.call(self.engine.forget_prefixes)

    def remember(self, texts: Sequence[Text]) -> Future[None]:
        """Add texts to those that drafts are taken from."""
        return self.call(partial(self.engine.remember, texts))

    def probe(self, prompts: Sequence[Sequence[int]], n: int, tokens: int, seed: int) -> Future[list[TokenTree]]:
        """See `Sampler.probe`."""
        return self.call(partial(self.sampler.probe, prompts, n=n, tokens=tokens, seed=seed))

    def digests(self) -> Future[dict[str, Held]]:
        """See `Sampler.digests`."""
        return self.call(lambda: dict(self.sampler.digests()))

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> Future[list[list[Array]]]:
        """Return the log-probs of continuations; see `RolloutEngine.score`."""
        return self.call(partial(self.engine.score, prompts, continuations))

    def questions(self) -> Future[list[Question]]:
        """Return the program's next questions to its verifier, as soon as there is one."""
        return self._questions.next()

    def answer(self, values: Mapping[int, float | None]) -> None:
        """Answer questions of the program; see `Questions.answer`."""
        self._questions.answer(values)

    def facts(self) -> Facts:
        """Return what does not change."""
        return Facts(self.engine.longest, list(self.engine.end_token_ids), os.getpid())

    def health(self) -> Health:
        """Return the present state; does not wait for the thread."""
        idle = time.monotonic() - self._alive_at if self._working or not self._commands.empty() else 0.0
        return Health(self.engine.policy_version, idle, self._failing, self._thread.is_alive(), self._tally)

    def stop(self) -> None:
        """End the thread after its current step; does not wait for it."""
        self._ending = True
        self._commands.put(lambda: None)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending:
            try:
                self._work()
            except BaseException as error:
                self._supervise(error)

    def _work(self) -> None:
        """Run queued commands for `TURN_S`, waiting for one if the engine is idle, then compute a step."""
        self._working = self.engine.loop.busy
        block, until = not self._working, math.inf
        while not self._ending and time.monotonic() < until:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                break
            self._working, self._alive_at, block = True, time.monotonic(), False
            until = min(until, self._alive_at + TURN_S)
            command()
        self._begin()
        if self._ending or not self.engine.loop.busy:
            return
        counts = self.engine.loop.counts
        steps = counts["steps"]
        done = self.sampler.step(0.0)
        self._tally = self.sampler.tally.copy()
        self._alive_at = time.monotonic()
        if self.sampler.failed is not None:
            self._log(self.sampler.failed)
        elif counts["steps"] != steps:
            self._failing = None
        else:
            time.sleep(PAUSE_S)
        self._answer(done)
        self._after_step()

    def _begin(self) -> None:
        """Submit the admissions whose weights are here, each as a whole."""
        waiting, self._admissions = self._admissions, []
        for jobs, held_out in waiting:
            if any(job.version > self.engine.policy_version for job in jobs.values()):
                self._admissions.append((jobs, held_out))
                continue
            try:
                flights = self.sampler.submit(list(jobs.values()), held_out=held_out)
            except Exception as error:
                for number in jobs:
                    self._promised.pop(number).set_exception(error)
                continue
            self._running |= dict(zip(flights, jobs, strict=True))

    def _answer(self, done: Sequence[Flight]) -> None:
        ended = [flight for flight in done if flight in self._running]
        trees = [flight.tree for flight in ended if flight.tree is not None]
        texts = iter([None] * len(trees) if self._texts is None else self._texts(trees))
        for flight in ended:
            future = self._promised.pop(self._running.pop(flight))
            if flight.tree is None:
                future.set_exception(flight.error)
            else:
                future.set_result(Result(flight.tree, next(texts), self._tally))

    def _supervise(self, error: BaseException) -> None:
        self._log(error)
        told = error if isinstance(error, Exception) else RuntimeError(sentence(error))
        running, self._running = self._running, {}
        for number in running.values():
            self._promised.pop(number).set_exception(told)
        self._failed(told)
        try:
            self.sampler.drop(list(running))
            self.engine.abort()
        except Exception as another:
            self._log(another)
            time.sleep(0.1)

    def _log(self, error: BaseException) -> None:
        self._failing = sentence(error)
        where = "".join(traceback.format_tb(error.__traceback__))
        if where not in self._logged:
            self._logged.add(where)
            log.error("A step of the engine failed; its requests fail with it.", exc_info=error)


def _copied(kept: Kept) -> Kept:
    try:
        copied: Kept = pickle.loads(pickle.dumps(kept))
    except Exception:  # an object of the program or the environment, which a checkpoint cannot hold either
        return Kept(None, "state")
    return copied


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(sentence(error)))


def sentence(error: BaseException) -> str:
    """Return the type and message of an error on one line, without a full stop."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(".")
