"""The interface through which a training run samples: it submits jobs and receives trees, both plain data.

The loop uses only this interface, so the sampler may be an engine of this process (`LocalSampler`), engines of other
processes, or a list of fixed answers in a test.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from ..data.segment import Text
from ..data.tree import TokenTree
from ..programs import RolloutProgram
from .branch import Request
from .engine import RolloutEngine
from .sampling_params import SamplingParams
from .saving import request_state, restore_request

Array = npt.NDArray[Any]
TALLIED = ("steps", "row_steps", "call_wait_us")
"""Counts of the engine that a sampler adds up."""


class LostError(RuntimeError):
    """The sampler has lost a job, for example in a restart; the job may begin again."""


@dataclass(frozen=True)
class Job:
    """A prompt to sample responses to.

    Attributes:
        prompt: token ids.
        seed: what the job samples follows from it, the prompt and ``params``.
        context: for the rollout program: an answer to verify with, hints.
        kept: state of an unfinished job (`Kept.state`), from which it goes on.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    context: Any = None
    kept: Mapping[str, Any] | None = None


@dataclass(eq=False)
class Flight:
    """A job on its way: ``tree`` or ``error`` is set when it is done."""

    job: Job
    tree: TokenTree | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.tree is not None or self.error is not None


class Kept(NamedTuple):
    """The checkpoint of an unfinished job: its state as plain values, or a word for the reason that it has none.

    Both are None for a job that has not begun.
    """

    state: dict[str, Any] | None
    why: str | None


class WeightSource(Protocol):
    """A source of new weights for a sampler."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all parameters by the names of the model's."""
        ...


class Sampler(Protocol):
    """Samples jobs with the newest weights that it has been given; one thread at a time calls it."""

    @property
    def longest(self) -> int | None:
        """Positions of the model; None where it has no limit."""
        ...

    @property
    def end_token_ids(self) -> Collection[int]:
        """End-of-sequence tokens of the model."""
        ...

    @property
    def tally(self) -> Counter[str]:
        """Counts since the start: ``steps``, ``row_steps``, ``call_wait_us``, and ``us``, microseconds of steps."""
        ...

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        """Begin ``jobs`` together; all, or none if one cannot be served.

        Raises:
            ValueError: a job cannot be served.
        """
        ...

    def step(self, seconds: float) -> list[Flight]:
        """Compute a step, or wait up to ``seconds`` where others compute; return the flights that are done.

        A flight whose job is lost has a `LostError`.
        """
        ...

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        """Return what can be kept of unfinished flights as they are now; they go on."""
        ...

    def drop(self, flights: Sequence[Flight]) -> None:
        """Stop flights, whose results are not wanted any more."""
        ...

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        """Sample with new weights from now on, also in responses already begun.

        Args:
            weights: None where the weights are in place already.
            version: of the policy, written to every token sampled.
            keep_keys: go on with keys that older weights computed.
        """
        ...

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        """Answer held-out problems: by the program where it answers these, else by plain sampling."""
        ...

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        """Return the log-probs [tokens] float32 of continuations, for each prompt; see `RolloutEngine.score`."""
        ...

    def forget_prefixes(self) -> None:
        """Drop keys that are kept for later jobs with the same prefixes."""
        ...

    def remember(self, texts: Iterable[Text]) -> None:
        """Draft from texts that were sampled before a restart."""
        ...

    def in_thread(self) -> AbstractContextManager[Any]:
        """Prepare the calling thread, which steps this sampler while another one trains."""
        ...

    def settle(self) -> None:
        """Wait until the device has done what was asked of it."""
        ...


class LocalSampler:
    """An engine in this process, and the program that steers it."""

    def __init__(self, engine: RolloutEngine, program: RolloutProgram) -> None:
        self.engine, self.program = engine, program
        self.tally: Counter[str] = Counter()
        self._flights: dict[Flight, Request] = {}
        self._landed: list[Flight] = []  # done, not returned yet

    @property
    def longest(self) -> int | None:
        return self.engine.longest

    @property
    def end_token_ids(self) -> Collection[int]:
        return self.engine.end_token_ids

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        requests = self.engine.submit(
            [job.prompt for job in jobs],
            [job.params for job in jobs],
            self.program,
            seeds=[job.seed for job in jobs],
            contexts=[job.context for job in jobs],
        )
        for job, request in zip(jobs, requests, strict=True):
            if job.kept is not None:
                self.engine.abort([request])
                restore_request(request, dict(job.kept))
                self.engine.submit([request])
        flights = [Flight(job) for job in jobs]
        self._flights |= dict(zip(flights, requests, strict=True))
        return flights

    def step(self, seconds: float) -> list[Flight]:
        counts = self.engine.loop.counts
        before, begin = {name: counts[name] for name in TALLIED}, time.perf_counter()
        self.engine.step()
        self.tally["us"] += round(1e6 * (time.perf_counter() - begin))
        self.tally.update({name: counts[name] - before[name] for name in TALLIED})
        self._land()
        if not self.engine.loop.busy:
            for flight in self._flights:
                flight.error = LostError("The engine does not know the request any more.")
            self._landed += self._flights
            self._flights.clear()
        done, self._landed = self._landed, []
        return done

    def _land(self) -> None:
        """Mark the flights that are done; any call that steps the engine may finish some."""
        done = [flight for flight, request in self._flights.items() if request.done]
        for flight in done:
            request = self._flights.pop(flight)
            flight.tree, flight.error = request.tree, request.error
        self._landed += done

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        requests = [self._flights[flight] for flight in flights]
        stopped = self.engine.abort(requests)
        try:
            return [self._kept(request) for request in requests]
        finally:
            self.engine.submit(stopped)

    def _kept(self, request: Request) -> Kept:
        if not request.started:
            return Kept(None, None)
        if request.calls and type(request.program).repeated is RolloutProgram.repeated:
            return Kept(None, "call")
        return Kept(request_state(request, self.program), None)

    def drop(self, flights: Sequence[Flight]) -> None:
        self.engine.abort([self._flights.pop(flight) for flight in flights])

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        tensors = None if weights is None else weights.tensors()
        self.engine.update_weights(tensors, version=version, keep_kv=keep_keys)

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        try:
            return self.engine.generate(
                [job.prompt for job in jobs],
                [job.params for job in jobs],
                self.program if self.program.answers_held_out else "flat",
                seeds=[job.seed for job in jobs],
                contexts=[job.context for job in jobs],
            )
        finally:
            self._land()

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        return self.engine.score(prompts, continuations)

    def forget_prefixes(self) -> None:
        self.engine.forget_prefixes()

    def remember(self, texts: Iterable[Text]) -> None:
        self.engine.remember(texts)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_initialized() else nullcontext():
            yield

    def settle(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
