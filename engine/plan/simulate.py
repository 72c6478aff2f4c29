"""A simulated run: the real `Controller`, `Buffer` and `Fleet` with models in the place of processes and models.

Nothing is computed, so a step of thousands of GPUs takes seconds. The rules of the run are the real ones: which group
is admitted, where its job goes, when it may be trained, what a lost engine costs. All times are the models' (`Times`);
a result is as good as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..fleet.fleet import Fleet
from ..fleet.publication import Publication
from ..loop.budget import Budget
from ..loop.buffer import Buffer
from ..loop.controller import Controller
from ..loop.sampling import SamplingParts
from ..programs import make_program
from ..prompts.group import Group
from ..prompts.prompts import Prompt
from ..record.metrics import Stopwatch
from ..rewards import Rewards
from ..rollout import SamplingParams
from .modelled import Load, Times
from .virtual import HostModel, JudgingModel, Lengths, ModelledTree, VirtualWorkers

LLAMA_3_FAILURES = 419 / (54 * 86400 * 16384)
"""Unexpected interruptions for each GPU and second: 419 in 54 days of 16,384 (Llama 3, arXiv 2407.21783, 3.3.4)."""


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Attributes:
        budget: batch, staleness and window.
        n: responses to each prompt.
        prompt: tokens of each prompt.
        lengths: lengths of responses.
        rows: rows of an engine's full batch.
        ranks: devices that train; an update takes as long as that of its largest share, of whole groups.
        engines: devices that sample.
        engine: times of an engine's steps.
        trainer: times of updates.
        publish_s: seconds for which new weights keep the trainer busy after each step.
        load_s: seconds in which an engine fetches them, while it samples.
        start_s: seconds of an engine's start.
        keep_keys: continue with keys that older weights computed.
        judge_s: seconds of a verdict on a response.
        judges: verifier processes.
        failures: ends of each device in a second. An engine is replaced. When a rank ends, all wait for ``restart_s``
            and for as long as has passed since the last checkpoint, whose steps are taken again; the groups are not
            rolled back.
        restart_s: seconds until lost ranks train again.
        save_every: steps between two checkpoints.
        look_s: see `VirtualWorkers`.
        seed: decides failures and, with ``lengths``, the lengths.
    """

    budget: Budget
    n: int
    prompt: int
    lengths: Lengths
    rows: int
    ranks: int
    engines: int
    engine: Times
    trainer: Times
    publish_s: float = 0.0
    load_s: float = 0.0
    start_s: float = 60.0
    keep_keys: bool = False
    judge_s: float = 0.0
    judges: int = 1
    failures: float = 0.0
    restart_s: float = 300.0
    save_every: int = 10
    look_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The steady state of a simulated run, as means over its later steps.

    Attributes:
        step_s: seconds of a step.
        tokens_s: trained response tokens in a second.
        update_s: seconds of an update.
        trainer_waits: share of the time in which the trainer waits for a batch.
        engines_idle: share of the time in which an engine takes no step.
        rows_idle: share of the rows of a full batch that sample nothing, over the steps that are taken.
        lag: mean lag of trained groups, in steps.
        max_lag: largest lag.
        lost_engines: engines that ended.
        lost_ranks: times that ranks ended.
        begun_anew: groups that began again because their engine ended.
    """

    step_s: float
    tokens_s: float
    update_s: float
    trainer_waits: float
    engines_idle: float
    rows_idle: float
    lag: float
    max_lag: int
    lost_engines: int
    lost_ranks: int
    begun_anew: int

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


class Simulation:
    """A simulated run; `step` takes a step, `outcome` describes those since `begin`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.workers = VirtualWorkers(scenario.look_s, scenario.failures, scenario.seed)
        self.busy: Counter[str] = Counter()
        host = (scenario.engine, scenario.lengths, scenario.prompt, scenario.rows, scenario.start_s, scenario.load_s)
        make: Any = HostModel
        self.fleet = Fleet(
            self.workers, scenario.engines, make, *host, self.busy, hang_s=1e9, start_s=1e9, restarts=1_000_000
        )
        self.buffer = Buffer(scenario.budget)
        prompts, quiet = _Prompts(), _Quiet()
        parts = SamplingParts(
            sampler=self.fleet,
            tokenizer=quiet,
            source=prompts,  # type: ignore[arg-type]
            program=make_program("flat"),
            program_name="flat",
            params=SamplingParams(n=scenario.n, max_new_tokens=1),
            seed=scenario.seed,
        )
        publication = Publication(self.fleet, quiet.note, keep_keys=scenario.keep_keys)
        self.controller = Controller(parts, self.buffer, publication, Stopwatch(self.workers.clock), quiet)
        judging: Any = JudgingModel(self.workers, scenario.judge_s, scenario.judges)
        self.controller.judging = judging
        self.lags: list[list[int]] = []
        """Lags of the groups of each step."""
        self._random = np.random.default_rng([scenario.seed, 1])
        self._rank_ends_at = self._next_end()
        self._saved_at, self._lost_ranks = 0.0, 0
        self.begin()

    def begin(self) -> None:
        """Begin the account of `outcome` now."""
        self._begin = self.workers.clock()
        self._first, self._tokens = len(self.lags), 0
        self._waited = self._updated = 0.0
        self.busy.clear()

    def step(self) -> list[Group]:
        """Take a step; return the groups that it trained."""
        clock, scenario = self.workers.clock, self.scenario
        begin = clock()
        batch = self.controller.next_batch()
        self._waited += clock() - begin
        self.lags.append([self.buffer.steps - group.started for group in batch])
        lengths = [_lengths(group) for group in batch]
        self._tokens += sum(map(sum, lengths))
        seconds = self._update_s(lengths)
        self._updated += seconds
        self._pass(seconds + scenario.publish_s)
        self.controller.end_step(batch, _WEIGHTS, self.buffer.steps + 1)
        while clock() >= self._rank_ends_at:
            self._lost_ranks += 1
            self._pass(scenario.restart_s + clock() - self._saved_at)
            self._rank_ends_at = self._next_end()
        if self.buffer.steps % scenario.save_every == 0:
            self._saved_at = clock()
        return batch

    def outcome(self) -> Outcome:
        """Return the means since `begin`."""
        scenario, lags = self.scenario, [lag for of_step in self.lags[self._first :] for lag in of_step]
        steps = len(self.lags) - self._first
        seconds = self.workers.clock() - self._begin
        full = self.busy["steps"] * scenario.rows
        return Outcome(
            step_s=seconds / steps,
            tokens_s=self._tokens / seconds,
            update_s=self._updated / steps,
            trainer_waits=self._waited / seconds,
            engines_idle=1 - self.busy["s"] / seconds / scenario.engines,
            rows_idle=1 - self.busy["rows"] / full if full else 1.0,
            lag=sum(lags) / len(lags),
            max_lag=max(lags),
            lost_engines=self.workers.ended,
            lost_ranks=self._lost_ranks,
            begun_anew=self.controller.restarted["lost"],
        )

    def _pass(self, seconds: float) -> None:
        """Let the trainer be busy for ``seconds``; at staleness above 0 the run samples on meanwhile."""
        end = self.workers.clock() + seconds
        with self.workers.until(end):
            while (before := self.workers.clock()) < end:
                if self.buffer.budget.staleness:
                    self.controller.advance()
                if self.workers.clock() == before:
                    self.workers.wait([], None)

    def _update_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the time of an update: that of a mean share, or of the largest group if that is longer."""
        trainer, ranks = self.scenario.trainer, self.scenario.ranks
        mean = trainer.update(groups) / ranks
        return mean if ranks == 1 else max(mean, max(trainer.update([group]) for group in groups))

    def _next_end(self) -> float:
        rate = self.scenario.failures * self.scenario.ranks
        return self.workers.clock() + self._random.exponential(1 / rate) if rate else float("inf")


def look_s(times: Times, lengths: Lengths, n: int) -> float:
    """Return a `Scenario.look_s` that delays no step by much: a 500th of the seconds in which an engine decodes the
    longest response of 16 groups alone."""
    longest = max(length for seed in range(16) for length in lengths(seed, n))
    return times.steps(Load(1, 0, 0, 0), longest) / 500


def simulate(scenario: Scenario, steps: int = 12, settling: int = 4) -> Outcome:
    """Simulate a run.

    Args:
        steps: number of steps, above ``settling``.
        settling: steps at the beginning that are not counted.
    """
    run = Simulation(scenario)
    with run.controller.running(_Unasked()):
        for step in range(steps):
            if step == settling:
                run.begin()
            run.step()
    return run.outcome()


def _lengths(group: Group) -> tuple[int, ...]:
    tree = group.tree
    assert isinstance(tree, ModelledTree)
    return tree.lengths


class _Prompts:
    """Returns one empty prompt as often as it is asked."""

    observes = False
    prompt = Prompt("", "", "", [0], {}, "")

    def next(self, count: int) -> list[Prompt]:
        return [self.prompt] * count


class _Quiet:
    """Takes the place of the console, and of the tokenizer, which the models never ask."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


class _Unasked(Rewards):
    def score(self, items: Sequence[Any]) -> list[Any]:
        raise AssertionError("The model of reward hosts judges.")


@dataclass(frozen=True)
class _Weights:
    held: Mapping[str, Tensor] = field(default_factory=lambda: {"w": torch.zeros(1)})

    def tensors(self) -> Mapping[str, Tensor]:
        return self.held


_WEIGHTS = _Weights()
