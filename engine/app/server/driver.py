"""Connects the event loop and the engine: one thread owns the engine and steps it while there is work.

    event loop --commands--> thread: submit, abort, score; step; --progress--> event loop

The event loop never waits for a step, so the server answers during one. An error in the thread fails all outstanding
jobs with its message and is logged once; the thread continues.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt

from ...programs import BranchId
from ...rollout import Request as Rollout
from ...rollout import RolloutEngine, SamplingParams

Array = npt.NDArray[Any]
T = TypeVar("T")
PAUSE_S = 0.005  # between polls of a paused engine
log = logging.getLogger("rolltree.serve")


class EngineFailedError(Exception):
    """The engine, not the request, is at fault."""


class Job:
    """The rollouts of one HTTP request.

    Attributes:
        watched: progress is wanted.
        rollouts: one for each prompt, once they are queued.
        progress: the responses so far of each rollout, as `RolloutEngine.progress` returns them; only if ``watched``.
        done: all rollouts have ended, or failed.
        error: the engine's failure, or None.
        changed: set in the event loop when any of these has changed.
    """

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.rollouts: list[Rollout] = []
        self.progress: list[dict[BranchId, Array]] = []
        self.done = False
        self.error: EngineFailedError | None = None
        self.changed = asyncio.Event()


class Driver:
    """Steps an engine in a separate thread.

    Args:
        engine: the engine; only the thread may call it once this has started.
        stalled_after_s: a step that takes longer, in seconds, while work is outstanding, makes `health` report failure.
    """

    def __init__(self, engine: RolloutEngine, *, stalled_after_s: float = 60.0) -> None:
        self.engine = engine
        self._stalled_after_s = stalled_after_s
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._ending = False
        self._outstanding = 0  # commands and jobs that the event loop waits for
        self._alive_at = time.monotonic()
        self._failing: str | None = None
        self._logged: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rolltree-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; call this in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; does not wait for it."""
        self._ending = True
        self._commands.put(None)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests can expect an answer, and the details for ``/health``."""
        idle = time.monotonic() - self._alive_at if self._outstanding else 0.0
        status = "ok"
        if not self._thread.is_alive():
            status = "the engine's thread has ended"
        elif idle > self._stalled_after_s:
            status = f"no step for {idle:.0f} s while work is outstanding"
        elif self._failing is not None:
            status = f"the last step failed: {self._failing}"
        known = {"outstanding": self._outstanding, "seconds_since_step": round(idle, 3)}
        return status == "ok", {"status": status, "policy_version": self.engine.policy_version, **known}

    # -- called on the event loop -----------------------------------------------------------------------------------

    async def submit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int], *, watched: bool
    ) -> Job:
        """Queue prompts.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters of each.
            seeds: seed of each.
            watched: record the progress in the job.

        Raises:
            ValueError: the engine refuses a prompt or its parameters.
        """
        job = Job(watched)

        def queue_all() -> None:
            job.rollouts = self.engine.submit(prompts, params, seeds=seeds)
            job.progress = [{} for _ in job.rollouts]
            self._jobs.append(job)

        try:
            await self.call(queue_all)
        except asyncio.CancelledError:
            self.abort(job)
            raise
        self._outstanding += 1
        return job

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the engine's thread, between two steps, and return its result."""
        self._expect()
        future: Future[T] = Future()
        self._commands.put(partial(_settle, future, function))
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._outstanding -= 1

    def abort(self, job: Job) -> None:
        """Abort the unfinished rollouts of a job."""

        def drop() -> None:
            if job in self._jobs:
                self._jobs.remove(job)
            self.engine.abort([rollout for rollout in job.rollouts if not rollout.done])

        self._commands.put(drop)

    def finished(self, job: Job) -> None:
        """Record that the event loop no longer waits for a job; an unfinished one is aborted."""
        self._outstanding -= 1
        if not job.done:
            self.abort(job)

    def _expect(self) -> None:
        if not self._outstanding:
            self._alive_at = time.monotonic()
        self._outstanding += 1

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending:
            try:
                self._work()
            except BaseException as error:
                self._supervise(error)

    def _work(self) -> None:
        """Run the queued commands, waiting for one if the engine is idle, then compute a step."""
        while not self._ending:
            try:
                command = self._commands.get(block=not self.engine.loop.busy)
            except queue.Empty:
                break
            self._alive_at = time.monotonic()
            if command is not None:
                command()
        if self._ending or not self.engine.loop.busy:
            return
        counts = self.engine.loop.counts
        steps, failed = counts["steps"], counts["failed_steps"]
        done = self.engine.step()
        self._alive_at = time.monotonic()
        if counts["failed_steps"] > failed:
            self._log(next((r.error for r in done if r.error is not None), RuntimeError("unknown")))
        elif counts["steps"] != steps:
            self._failing = None
        else:
            time.sleep(PAUSE_S)
        self._publish()

    def _publish(self) -> None:
        changed = []
        for job in list(self._jobs):
            job_done = all(rollout.done for rollout in job.rollouts)
            if job.watched:
                job.progress = [self.engine.progress(r) if not r.done else {} for r in job.rollouts]
            if job_done:
                self._jobs.remove(job)
            if job_done or job.watched:
                changed.append((job, job_done))
        if changed:
            self._tell(changed)

    def _supervise(self, error: BaseException) -> None:
        self._log(error)
        failed, self._jobs = self._jobs, []
        for job in failed:
            job.error = EngineFailedError(f"The engine failed: {_sentence(error)}.")
        self._tell([(job, True) for job in failed])
        try:
            self.engine.abort()
        except Exception as another:
            self._log(another)
            time.sleep(0.1)

    def _log(self, error: BaseException) -> None:
        self._failing = _sentence(error)
        where = "".join(traceback.format_tb(error.__traceback__))
        if where not in self._logged:
            self._logged.add(where)
            log.error("A step of the engine failed; its requests fail with it.", exc_info=error)

    def _tell(self, changed: Sequence[tuple[Job, bool]]) -> None:
        def tell() -> None:
            for job, done in changed:
                job.done |= done
                job.changed.set()

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the event loop has been closed
            self._ending = True


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(_sentence(error)))


def _sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(".")
