"""The sampler of an engine in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..data.segment import Text
from ..data.tree import TokenTree
from ..programs import RolloutProgram, make_program
from .branch import Request
from .digest import Held
from .engine import RolloutEngine
from .sampler import FLOP, TALLIED, Flight, Job, Kept, LostError, WeightSource
from .sampling_params import SamplingParams
from .saving import request_state, restore_request

Array = npt.NDArray[Any]


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
            request.owner, request.held_out = job.owner, held_out
            if job.kept is not None:
                self.engine.abort([request])
                restore_request(request, dict(job.kept))
                self.engine.submit([request])
        flights = [Flight(job) for job in jobs]
        self._flights |= dict(zip(flights, requests, strict=True))
        return flights

    def step(self, seconds: float) -> list[Flight]:
        begin, failed = time.perf_counter(), self.engine.loop.counts["failed_steps"]
        with self._tallied(TALLIED):
            ended = self.engine.step()
        self.failed = None
        if self.engine.loop.counts["failed_steps"] > failed:
            self.failed = next((request.error for request in ended if request.error), RuntimeError("unknown"))
        self.tally["us"] += round(1e6 * (time.perf_counter() - begin))
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

    def progress(self, flight: Flight) -> Array | None:  # [n] int32
        """Return the tokens so far of an unfinished job of one response; None before the engine begins with it."""
        if not (request := self._flights[flight]).started:
            return None
        records_of = self.engine.progress(request)
        return next((records["token"] for records in records_of.values()), np.zeros(0, np.int32))

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
            with self._tallied(FLOP):
                return self.engine.generate(
                    [job.prompt for job in jobs],
                    [job.params for job in jobs],
                    self._held_out,
                    seeds=[job.seed for job in jobs],
                    contexts=[job.context for job in jobs],
                    pictures=[job.pictures for job in jobs],
                    held_out=True,
                )
        finally:
            self._land()

    @contextmanager
    def _tallied(self, names: Sequence[str]) -> Iterator[None]:
        """Add what the engine counts in a with-block to `tally`."""
        counts = self.engine.loop.counts
        before = {name: counts[name] for name in names}
        try:
            yield
        finally:
            self.tally.update({name: counts[name] - before[name] for name in names})

    @property
    def _held_out(self) -> str | RolloutProgram:
        return self.program if self.program.answers_held_out else "flat"

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        with self._tallied(FLOP):
            return self.engine.score(prompts, continuations)

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        params = SamplingParams(n=n, max_new_tokens=tokens, ignore_eos=True, seed=seed)
        try:
            with self._tallied(FLOP):
                return self.engine.generate(prompts, params)
        finally:
            self._land()

    def digests(self) -> Mapping[str, Held]:
        return self.engine.digests()

    def rest(self) -> None:
        self.engine.sleep()  # not the weights, which may be the trainer's

    def wake(self) -> None:
        self.engine.wake()

    def let_go(self, owners: Sequence[int]) -> None:
        self.engine.let_go(owners)

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
        self.program.close()
