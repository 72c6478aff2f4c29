"""The interface through which a training run samples: jobs go in, trees come out, both plain data.

The loop uses only this interface, so a sampler may be an engine of this process (`LocalSampler`), engines of other
processes, or fixed answers in a test.
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

from ..data.media import Picture
from ..data.segment import Text
from ..data.tree import TokenTree
from ..programs import RolloutProgram, make_program
from .branch import Request
from .digest import Held
from .engine import RolloutEngine
from .sampling_params import SamplingParams
from .saving import request_state, restore_request

Array = npt.NDArray[Any]
TALLIED = ("steps", "row_steps", "call_wait_us")
"""Counts of the engine that a sampler adds up."""


class LostError(RuntimeError):
    """The sampler has lost a job, which may be submitted again."""


@dataclass(frozen=True)
class Job:
    """A prompt to sample responses to.

    Attributes:
        prompt: token ids.
        seed: determines the samples together with the prompt and ``params``.
        context: input of the rollout program, for example the answer to verify with.
        kept: state of an unfinished job (`Kept.state`), from which it continues.
        version: policy version of the oldest weights that may sample it.
        near: `Flight.place` of an earlier job with the same prompt, whose keys may still be there.
        pictures: those whose rows are among ``prompt``.
    """

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    context: Any = None
    kept: Mapping[str, Any] | None = None
    version: int = 0
    near: int | None = None
    pictures: tuple[Picture, ...] = ()


@dataclass(eq=False)
class Flight:
    """A submitted job; ``tree`` or ``error`` is set when it is done.

    Attributes:
        texts: texts of the leaves' responses, if the sampler has decoded them.
        begun_anew: how often the job began anew, because the engine that had it was lost.
        place: number of the engine that had it, of several.
    """

    job: Job
    tree: TokenTree | None = None
    error: Exception | None = None
    texts: list[str] | None = None
    begun_anew: int = 0
    place: int | None = None

    @property
    def done(self) -> bool:
        return self.tree is not None or self.error is not None


class Kept(NamedTuple):
    """State of an unfinished job as plain values for a checkpoint, or a word for the reason that it has none.

    Both are None for a job that has not begun.
    """

    state: dict[str, Any] | None
    why: str | None


class WeightSource(Protocol):
    """Source of a sampler's new weights."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all parameters by their names in the model."""
        ...


class Sampler(Protocol):
    """Samples jobs with the newest weights that were loaded; one thread at a time calls it."""

    @property
    def longest(self) -> int | None:
        """Number of positions of the model; None without a limit."""
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
        """Begin all ``jobs``, or none if one cannot be served.

        Raises:
            ValueError: a job cannot be served.
        """
        ...

    def step(self, seconds: float) -> list[Flight]:
        """Compute a step, or wait up to ``seconds`` for other processes' steps; return the flights that are done.

        The ``error`` of a flight whose job is lost is a `LostError`.
        """
        ...

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        """Return the present state of unfinished flights, which continue."""
        ...

    def drop(self, flights: Sequence[Flight]) -> None:
        """Stop flights and discard them."""
        ...

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        """Use new weights for every token sampled from now on, also in unfinished responses.

        Args:
            weights: None if the model's own parameters were changed in place.
            version: version of the policy, recorded with every sampled token.
            keep_keys: keep the keys that older weights computed.
        """
        ...

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        """Answer held-out problems with the program if it supports these, otherwise by plain sampling."""
        ...

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        """Return the log-probs [tokens] float32 of continuations, for each prompt; see `RolloutEngine.score`."""
        ...

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        """Sample ``n`` plain responses of ``tokens`` tokens to each prompt, as rollouts are sampled but without a
        program and at temperature 1. Unfinished flights may continue meanwhile."""
        ...

    def digests(self) -> Mapping[str, Held]:
        """Return the digests of the weights that it samples with, by their names in the model; those of weights that
        it keeps in another form are absent."""
        ...

    def rest(self) -> None:
        """Free memory of the device until `wake`, for the trainer; return when it is free. Unfinished flights wait."""
        ...

    def wake(self) -> None:
        """Continue after `rest`."""
        ...

    def forget_prefixes(self) -> None:
        """Drop the cached keys of prefixes."""
        ...

    def remember(self, texts: Iterable[Text]) -> None:
        """Add texts that were sampled before a restart to those that drafts are taken from."""
        ...

    def in_thread(self) -> AbstractContextManager[Any]:
        """Prepare the calling thread, which steps this sampler while another thread trains."""
        ...

    def settle(self) -> None:
        """Wait until the device has finished its work."""
        ...

    def close(self) -> None:
        """End the processes that sample, if it has any of its own."""
        ...


class LocalSampler:
    """Samples with an engine in this process and a rollout program.

    Attributes:
        failed: error of the last step if it failed as a whole, which ended all requests that it computed.
    """

    def __init__(self, engine: RolloutEngine, program: str | RolloutProgram) -> None:
        self.engine = engine
        self.program = make_program(program) if isinstance(program, str) else program
        self.tally: Counter[str] = Counter()
        self.failed: Exception | None = None
        self._flights: dict[Flight, Request] = {}
        self._landed: list[Flight] = []  # done, not returned yet

    @property
    def longest(self) -> int | None:
        return self.engine.longest

    @property
    def end_token_ids(self) -> Collection[int]:
        return self.engine.end_token_ids

    def submit(self, jobs: Sequence[Job], *, held_out: bool = False) -> list[Flight]:
        requests = self.engine.submit(
            [job.prompt for job in jobs],
            [job.params for job in jobs],
            self._held_out if held_out else self.program,
            seeds=[job.seed for job in jobs],
            contexts=[job.context for job in jobs],
            pictures=[job.pictures for job in jobs],
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
        before, begin = {name: counts[name] for name in (*TALLIED, "failed_steps")}, time.perf_counter()
        ended = self.engine.step()
        self.failed = None
        if counts["failed_steps"] > before["failed_steps"]:
            self.failed = next((request.error for request in ended if request.error), RuntimeError("unknown"))
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
        """Set the results of the flights that are done, since any call that steps the engine may finish some."""
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
                self._held_out,
                seeds=[job.seed for job in jobs],
                contexts=[job.context for job in jobs],
                pictures=[job.pictures for job in jobs],
            )
        finally:
            self._land()

    @property
    def _held_out(self) -> str | RolloutProgram:
        return self.program if self.program.answers_held_out else "flat"

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        return self.engine.score(prompts, continuations)

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        params = SamplingParams(n=n, max_new_tokens=tokens, ignore_eos=True, seed=seed)
        try:
            return self.engine.generate(prompts, params)
        finally:
            self._land()

    def digests(self) -> Mapping[str, Held]:
        return self.engine.digests()

    def rest(self) -> None:
        self.engine.sleep()  # not the weights, which may be the trainer's

    def wake(self) -> None:
        self.engine.wake()

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

    def close(self) -> None:
        return
