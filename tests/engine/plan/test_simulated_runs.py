"""The simulator against runs in real time, whose engines are processes of Ray that sleep (mark ``ray``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.publication import Publication
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.loop.controller import Controller
from rolltree.engine.loop.sampling import SamplingParts
from rolltree.engine.plan.modelled import MeasuredRates
from rolltree.engine.plan.simulate import Scenario, simulate
from rolltree.engine.programs import make_program
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.record.metrics import Stopwatch
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rollout import SamplingParams

from .sleeping import SleepingHost, lengths

RATES = MeasuredRates(step_s=0.015, token_s=0.0012, prompt=1)
STEPS, SETTLING, WITHIN = 14, 4, 0.1


class Verdicts(Rewards):
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(float(i % 2), None) for i, _ in enumerate(items)]


class Prompts:
    observes = False

    def next(self, count: int) -> list[Prompt]:
        return [Prompt("", "", "", [1], {}, "")] * count


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: ""


class Weights:
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(1)}


@dataclass(frozen=True)
class Seen:
    step_s: float
    lag: float


def run_for_real(made: Scenario, workers: Any) -> Seen:
    """Run as `simulate` does, in real time: updates sleep too."""
    quiet, prompts = Quiet(), Prompts()
    host = (RATES.step_s, made.load_s, made.rows)
    make: Any = SleepingHost
    fleet = Fleet(workers, made.engines, make, *host, hang_s=60.0, start_s=300.0, restarts=0)
    parts: Any = SamplingParts(
        sampler=fleet,
        tokenizer=quiet,  # type: ignore[arg-type]
        source=prompts,  # type: ignore[arg-type]
        program=make_program("flat"),
        program_name="flat",
        params=SamplingParams(n=made.n, max_new_tokens=1),
        seed=made.seed,
        overlaps=made.budget.staleness > 0,
    )
    buffer = Buffer(made.budget)
    sends = Publication(fleet, quiet.note, keep_keys=True)
    controller = Controller(parts, buffer, sends, Stopwatch(), quiet)
    lags: list[int] = []
    while not all(engine.serving for engine in fleet._engines):
        fleet.step(0.1)
    with controller.running(Verdicts()):
        for step in range(STEPS):
            if step == SETTLING:
                begin = time.monotonic()
                lags.clear()
            batch = controller.next_batch()
            lags += [buffer.steps - group.started for group in batch]
            time.sleep(
                made.trainer.update(
                    [lengths(controller._seeds(group.ticket, group.attempt), made.n) for group in batch]
                )
            )
            controller.end_step(batch, Weights(), step + 1)
        seconds = time.monotonic() - begin
    fleet.close()
    workers.close()
    return Seen(seconds / (STEPS - SETTLING), sum(lags) / len(lags))


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """One Ray for all tests."""
    from rolltree.engine.fleet.ray import RayWorkers

    RayWorkers({"engine": ({"CPU": 0.25}, 4)}).close()
    import ray

    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("engines", [1, 2, 4])
def test_a_simulated_run_takes_the_time_of_a_real_one(ray: None, engines: int, staleness: int) -> None:
    """Step time and lag within a tenth; a simulation with an engine or a trainer of half the rate is not."""
    from rolltree.engine.fleet.ray import RayWorkers

    made = Scenario(
        Budget(8, staleness, 0.25), 2, 1, lengths, 8, 1, engines, RATES, RATES, load_s=0.1, keep_keys=True, seed=3
    )
    real = run_for_real(made, RayWorkers({"engine": ({"CPU": 0.25}, engines)}))
    found = simulate(made, STEPS, SETTLING)
    print(f"{engines} engines, S = {staleness}: {real}; simulated {found.step_s:.3f} s, lag {found.lag:.2f}")
    assert found.step_s == pytest.approx(real.step_s, rel=WITHIN)
    assert found.lag == pytest.approx(real.lag, rel=WITHIN)
    slow_engine = simulate(replace(made, engine=replace(RATES, step_s=2 * RATES.step_s)), STEPS, SETTLING)
    slow_trainer = simulate(replace(made, trainer=replace(RATES, token_s=2 * RATES.token_s)), STEPS, SETTLING)
    assert max(slow_engine.step_s, slow_trainer.step_s) > (1 + WITHIN) * real.step_s
    if staleness == 0:  # both add to a step
        assert min(slow_engine.step_s, slow_trainer.step_s) > (1 + WITHIN) * real.step_s
