"""Simulated runs on 8 to 4,096 GPUs, and the time that the real driver of a run needs for a group.

``rolltree bench simulate`` first measures the driver here: the real `Controller`, `Buffer` and `Fleet` with engines
that answer at once and keep what they have sampled, as in a run with several ranks. Then it simulates each number of
GPUs and each staleness, with a quarter of the GPUs training, and prints the shares of the time that two things need
which do not grow with the GPUs: the driver's thread, and the passing on of weights. The larger is the first limit.

Figures of GPUs are simulated by the arithmetic of `DeviceModel`, and called so. Those of the driver are this machine's:
keep it idle meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from dataclasses import replace as replaced
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolltree.engine import TokenTree, UserError
from rolltree.engine.data.stored import StoredTree
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.host import Facts, Health, Result
from rolltree.engine.fleet.publication import Publication
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.buffer import Buffer
from rolltree.engine.loop.controller import Controller
from rolltree.engine.loop.sampling import SamplingParts
from rolltree.engine.plan.modelled import MEMORY, DeviceModel, Shape
from rolltree.engine.plan.rates import TO_STORE, broadcast_s, recorded_lengths
from rolltree.engine.plan.simulate import LLAMA_3_FAILURES, Outcome, Scenario, Simulation, look_s
from rolltree.engine.programs import make_program
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.record.metrics import Stopwatch
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards
from rolltree.engine.rollout import SamplingParams

from .long_tail import Quiet

MODEL = "Qwen3-8B"
SHAPE = Shape(8.19e9, 36, 32, 8, 128)
PROMPT, RESPONSES, MEDIAN, LONGEST, ROWS = 512, 16, 2048, 16384, 256
BATCHES = {8: 64, 64: 512, 512: 2048, 4096: 8192}
"""Prompts of a step, by the number of GPUs."""
LOSSES = 4
"""Losses that a simulated run with raised failures shall have, from which the cost of one follows."""


# -- the driver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """The time of the driver's thread, measured.

    Attributes:
        group_s: seconds for a group with its responses, whatever their lengths.
        token_s: seconds more for each of its tokens.
        told_bytes: size of what an engine tells of a group of long responses.
        groups_s: groups a second, of the short ones.
        tokens_s: tokens a second, of the long ones.
        lag_s: the longest round, for which an engine's answer may wait.
        usual_lag_s: the median round.
        grown_mb: 1e6 bytes by which the process's largest size grew over ``groups`` groups.
        groups: number of groups.
    """

    group_s: float
    token_s: float
    told_bytes: int
    groups_s: float
    tokens_s: float
    lag_s: float
    usual_lag_s: float
    grown_mb: float
    groups: int


class AtOnce:
    """`Workers` whose engines answer at once, all with one tree, which stays there; the result without its tokens
    arrives pickled, as it would."""

    def __init__(self, tree: TokenTree) -> None:
        self.told = pickle.dumps(Result(StoredTree.of(tree), [], Counter()), protocol=5)

    def start(self, role: str, index: int, make: Callable[..., object], *args: Any) -> AtOnce:
        return self

    def ask(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answers = {"facts": Facts(None, [0], 0), "health": Health(0, 0.0, None, True, Counter())}
        answer.set_result(answers.get(method))
        return answer

    def leave(self, worker: Any, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result((pickle.loads(self.told), None))
        return answer

    def put(self, value: Any) -> Any:
        return value

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        return {future for future in futures if future.done()}

    def clock(self) -> float:
        return time.monotonic()

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Verdicts(Rewards):
    """Judges nothing: every second response is right. Texts are left where they are, as reward hosts have it."""

    fetches = True

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(float(i % 2), None) for i in range(len(items))]


class Prompts:
    """Returns one prompt as often as it is asked."""

    observes = False
    prompt = Prompt("x", "none", "text", [1, 2, 3], {"answer": "1"}, "x")

    def next(self, count: int) -> list[Prompt]:
        return [self.prompt] * count


def measure_driver(groups: int, engines: int = 64, batch: int = 512, staleness: int = 1) -> Driver:
    """Measure the driver over ``groups`` groups of short responses, and over a tenth as many of long ones."""
    short, long = 16, 512
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, rounds = _drive(short, groups, engines, batch, staleness)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    few = max(batch, groups // 100)
    of_long, _ = _drive(long, few, engines, batch, staleness)
    a, b = seconds / groups, of_long / few
    token_s = max(0.0, (b - a) / (RESPONSES * (long - short)))
    return Driver(
        group_s=max(0.0, a - token_s * RESPONSES * short),
        token_s=token_s,
        told_bytes=len(AtOnce(_tree(long)).told),
        groups_s=1 / a,
        tokens_s=RESPONSES * long / b,
        lag_s=max(rounds),
        usual_lag_s=float(np.median(rounds)),
        grown_mb=grown * 1024 / 1e6,
        groups=groups,
    )


def _tree(length: int) -> TokenTree:
    responses = [[7 + i] + [8] * (length - 1) for i in range(RESPONSES)]
    logprobs = [np.full(length, -1.0, np.float32)] * RESPONSES
    return TokenTree.from_sequences([1, 2, 3], responses, behaviour_logprobs=logprobs, policy_version=2**20)


def _drive(length: int, groups: int, engines: int, batch: int, staleness: int) -> tuple[float, list[float]]:
    """Return the seconds for at least ``groups`` groups of 16 responses, and those of each round."""
    quiet: Any = Quiet()
    workers: Any = AtOnce(_tree(length))
    prompts: Any = Prompts()
    parts = SamplingParts(
        sampler=Fleet(workers, engines, workers.start, hang_s=1e9, start_s=1e9, restarts=0, stores=True),
        tokenizer=quiet,
        source=prompts,
        program=make_program("flat"),
        program_name="flat",
        params=SamplingParams(n=RESPONSES, max_new_tokens=length),
        seed=0,
    )
    buffer = Buffer(Budget(batch, staleness))
    controller = Controller(parts, buffer, Publication(parts.sampler, quiet.note), Stopwatch(), quiet)
    rounds: list[float] = []
    inner = controller.advance

    def timed() -> None:
        begin = time.perf_counter()
        inner()
        rounds.append(time.perf_counter() - begin)

    controller.advance = timed  # type: ignore[method-assign]
    with controller.running(Verdicts()):
        controller.end_step(controller.next_batch(), None, 0)  # warm
        rounds.clear()
        begin = time.perf_counter()
        for step in range(math.ceil(groups / batch)):
            controller.end_step(controller.next_batch(), None, step + 1)
        seconds = time.perf_counter() - begin
    return seconds * groups / (math.ceil(groups / batch) * batch), rounds


# -- simulated runs ---------------------------------------------------------------------------------------------------


@cache
def log_normal(seed: int, n: int) -> list[int]:
    """Return lengths as in recorded runs: log-normal with sigma 1, and cut."""
    drawn = np.random.default_rng(seed % 2**63).lognormal(math.log(MEDIAN), 1.0, n)
    lengths: list[int] = np.clip(np.ceil(drawn), 1, LONGEST).astype(int).tolist()
    return lengths


@dataclass(frozen=True)
class Row:
    """A simulated run with its limits.

    Attributes:
        failures_day: failures of all GPUs in a day, at the rate of Llama 3's training.
        lost: share of the time that they cost.
        driver: share of the driver's thread that is busy; None if it was not measured.
        weights: share of the time in which weights are passed on.
    """

    gpus: int
    ranks: int
    staleness: int
    prompts: int
    outcome: Outcome
    failures_day: float
    lost: float
    driver: float | None
    weights: float

    @property
    def limit(self) -> str:
        """The name of the largest share."""
        shares = {"driver": self.driver or 0.0, "weights": self.weights}
        name = max(shares, key=lambda key: shares[key])
        return f"{name} ({100 * shares[name]:.2g} %)"


def scenario(gpus: int, staleness: int, gpu: str, lengths: Any, prompt: int) -> Scenario:
    """Return the run of 8-billion-parameter models on ``gpus`` GPUs, a quarter of which train."""
    times = DeviceModel(SHAPE, MEMORY[gpu], prompt)
    ranks = max(1, gpus // 4)
    size = 2 * SHAPE.weights
    return Scenario(
        budget=Budget(BATCHES.get(gpus, 4 * gpus), staleness, 0.25 if staleness else 0.0),
        n=RESPONSES,
        prompt=prompt,
        lengths=lengths,
        rows=ROWS,
        ranks=ranks,
        engines=gpus - ranks,
        engine=times,
        trainer=times,
        publish_s=size / ranks / TO_STORE,
        load_s=broadcast_s(size, gpus - ranks, ranks),
        start_s=300.0,
        look_s=look_s(times, lengths, RESPONSES),
    )


def simulated(scenario: Scenario, steps: int, driver: Driver | None) -> Row:
    """Simulate a run with and without failures."""
    settling = scenario.budget.staleness + 2
    base, plain = _run(scenario, steps, settling)
    gpus = scenario.ranks + scenario.engines
    rate = LOSSES / (gpus * plain)
    failing, seconds = _run(replaced(scenario, failures=rate), steps, settling)
    losses = failing.lost_engines + failing.lost_ranks
    cost = max(0.0, seconds - plain) / losses if losses else 0.0
    groups_s = scenario.budget.batch / base.step_s
    busy = None if driver is None else groups_s * driver.group_s + base.tokens_s * driver.token_s
    return Row(
        gpus=gpus,
        ranks=scenario.ranks,
        staleness=scenario.budget.staleness,
        prompts=scenario.budget.batch,
        outcome=base,
        failures_day=LLAMA_3_FAILURES * gpus * 86400,
        lost=cost * LLAMA_3_FAILURES * gpus,
        driver=busy,
        weights=(scenario.publish_s + scenario.load_s) / base.step_s,
    )


def _run(scenario: Scenario, steps: int, settling: int) -> tuple[Outcome, float]:
    """Return the outcome and the seconds of all steps."""
    run = Simulation(scenario)
    with run.controller.running(Verdicts()):
        for step in range(settling + steps):
            if step == settling:
                run.begin()
            run.step()
    return run.outcome(), run.workers.clock()


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table in Markdown."""
    yield (
        "| GPUs | train | S | prompts | step s | tokens/s a GPU | trainer waits | engines idle | largest lag | "
        "failures a day | time lost to them | driver | weights | first limit |"
    )
    yield "|---" * 14 + "|"
    for row in rows:
        outcome = row.outcome
        cells = [
            row.gpus, row.ranks, row.staleness, row.prompts, f"{outcome.step_s:.0f}",
            f"{outcome.tokens_s / row.gpus:.0f}",
            f"{100 * outcome.trainer_waits:.0f} %", f"{100 * outcome.engines_idle:.0f} %", outcome.max_lag,
            f"{row.failures_day:.2g}", f"{100 * row.lost:.2g} %",
            "not measured" if row.driver is None else f"{100 * row.driver:.2g} %",
            f"{100 * row.weights:.2g} %", row.limit,
        ]  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"


def main(argv: Sequence[str]) -> int:
    """Run ``rolltree bench simulate`` and return its exit status."""
    parser = argparse.ArgumentParser(prog="rolltree bench simulate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 4096], metavar="N")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4], metavar="S")
    parser.add_argument("--gpu", default="H100", choices=sorted(MEMORY))
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps that count (default 4)")
    parser.add_argument("--recorded", type=Path, metavar="RUN", help="lengths of this run's rollouts")
    parser.add_argument(
        "--groups", type=int, default=100_000, metavar="N", help="groups for the driver (default 100000); 0: leave out"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows as JSON lines")
    args = parser.parse_args(argv)
    if min(*args.gpus, 2) < 2 or min(args.staleness) < 0 or args.steps < 1 or args.groups < 0:
        parser.error("there must be 2 GPUs or more, a staleness of 0 or more, and a step or more")
    lengths: Any = log_normal
    prompt = PROMPT
    try:
        if args.recorded is not None:
            lengths, prompt = recorded_lengths(args.recorded)
    except UserError as error:
        print(f"rolltree bench simulate: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    driver = measure_driver(args.groups) if args.groups else None
    if driver is not None:
        load = os.getloadavg()[0]
        print(
            f"Driver, measured here over {driver.groups} groups of {RESPONSES} responses (load {load:.1f}): "
            f"{driver.groups_s:,.0f} short groups/s, {driver.tokens_s:,.0f} tokens/s of long ones, "
            f"of a group of which an engine tells {driver.told_bytes:,} bytes; a round takes "
            f"{1e3 * driver.usual_lag_s:.3g} ms, at most {1e3 * driver.lag_s:.3g} ms; the process grew by "
            f"{driver.grown_mb:.0f} MB."
        )
        _keep(args.out, {"driver": asdict(driver), "load": load})
    of = f"lengths of {args.recorded}" if args.recorded else f"lengths log-normal, median {MEDIAN}, at most {LONGEST}"
    print(f"\nSimulated, not measured: {MODEL} on {args.gpu}s, {RESPONSES} responses a prompt, {of}\n", flush=True)
    rows = []
    for gpus in args.gpus:
        for staleness in args.staleness:
            rows.append(simulated(scenario(gpus, staleness, args.gpu, lengths, prompt), args.steps, driver))
            _keep(args.out, asdict(rows[-1]))
            print(f"{gpus} GPUs, S = {staleness}", file=sys.stderr, flush=True)
    print("\n".join(lines(rows)))
    return 0


def _keep(file: Path | None, row: dict[str, Any]) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
