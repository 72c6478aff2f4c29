"""Connects the event loop and the engine's host: the rollouts of HTTP requests, their progress and their end.

The event loop never waits for a step, so the server answers during one. An error in a step fails all outstanding jobs
with its message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from ..data.media import Picture
from ..programs import BranchId
from ..rollout import Request as Rollout
from ..rollout import RolloutEngine, SamplingParams
from .host import Host, sentence

Array = npt.NDArray[Any]
T = TypeVar("T")


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


class Rollouts:
    """The jobs of a server; all public methods are called in its event loop.

    Args:
        engine: the engine; only its host may call it once this has started.
        stalled_after_s: a step that takes longer, in seconds, while work is outstanding, makes `health` report failure.
    """

    def __init__(self, engine: RolloutEngine, *, stalled_after_s: float = 60.0) -> None:
        self.engine = engine
        self._stalled_after_s = stalled_after_s
        self._jobs: list[Job] = []  # used by the host's thread alone
        self._outstanding = 0  # calls and jobs that the event loop waits for

    def start(self) -> None:
        """Start the engine's host; call this in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._host = Host(self.engine, after_step=self._publish, failed=self._fail)

    def stop(self) -> None:
        """End the host after its current step; does not wait for it."""
        self._host.stop()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests can expect an answer, and the details for ``/health``."""
        health = self._host.health()
        status = "ok"
        if not health.alive:
            status = "the engine's thread has ended"
        elif health.idle_s > self._stalled_after_s:
            status = f"no step for {health.idle_s:.0f} s while work is outstanding"
        elif health.failing is not None:
            status = f"the last step failed: {health.failing}"
        details = {"outstanding": self._outstanding, "seconds_since_step": round(health.idle_s, 3)}
        return status == "ok", {"status": status, "policy_version": health.version, **details}

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        *,
        pictures: Sequence[Sequence[Picture]] | None = None,
        watched: bool,
    ) -> Job:
        """Queue prompts.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters of each.
            seeds: seed of each.
            pictures: those of each, whose rows are among its token ids.
            watched: record the progress in the job.

        Raises:
            ValueError: the engine refuses a prompt or its parameters.
        """
        job = Job(watched)

        def queue_all() -> None:
            job.rollouts = self.engine.submit(prompts, params, seeds=seeds, pictures=pictures)
            job.progress = [{} for _ in job.rollouts]
            self._jobs.append(job)

        try:
            await self.call(queue_all)
        except asyncio.CancelledError:
            self._abort(job)
            raise
        self._outstanding += 1
        return job

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the engine's thread, between two steps, and return its result."""
        self._outstanding += 1
        try:
            return await asyncio.wrap_future(self._host.call(function))
        finally:
            self._outstanding -= 1

    def later(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the engine's thread, between two steps, without waiting for it."""
        self._host.call(function)

    def finished(self, job: Job) -> None:
        """Record that the event loop no longer waits for a job; an unfinished one is aborted."""
        self._outstanding -= 1
        if not job.done:
            self._abort(job)

    def _abort(self, job: Job) -> None:
        """Abort the unfinished rollouts of a job."""

        def drop() -> None:
            if job in self._jobs:
                self._jobs.remove(job)
            self.engine.abort([rollout for rollout in job.rollouts if not rollout.done])

        self.later(drop)

    # -- called in the host's thread ----------------------------------------------------------------------------------

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

    def _fail(self, error: Exception) -> None:
        failed, self._jobs = self._jobs, []
        for job in failed:
            job.error = EngineFailedError(f"The engine failed: {sentence(error)}.")
        self._tell([(job, True) for job in failed])

    def _tell(self, changed: Sequence[tuple[Job, bool]]) -> None:
        def tell() -> None:
            for job, done in changed:
                job.done |= done
                job.changed.set()

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the event loop has been closed
            self._host.stop()
