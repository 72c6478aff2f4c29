"""Answers of the group callback at staleness 0 act while others are sampled, at the same step for any verifier."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.loop.budget import Budget
from rolltree.engine.loop.callback import CallbackRule
from rolltree.engine.methods.groups import Answer, Drop, More
from rolltree.engine.rewards import RewardItem, RewardResult
from rolltree.engine.rollout.sampler import Flight, Job

from ...support.real_step import take_steps
from ...support.tiny import tiny_job
from .test_sampler import Canned, Odd, Tensors, controller

P = 4
STEPS = 3


class Told(Canned):
    """Takes 1 to 9 steps for a prompt, and writes down the step, prompt and number of responses of each job."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[int, int, int]] = []
        self.ends: list[tuple[int, int]] = []

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        self.jobs += [(self.tally["steps"], job.prompt[0], job.params.n) for job in jobs]
        flights = super().submit(jobs)
        self.waiting |= {flight: flight.job.prompt[0] * 2 % 9 for flight in flights}
        return flights

    def step(self, seconds: float) -> list[Flight]:
        done = super().step(seconds)
        self.ends += [(self.tally["steps"], flight.job.prompt[0]) for flight in done]
        return done


class Late(Odd):
    """Judges after 0 to ``seconds``, many requests at once."""

    at_once = 8  # requests

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        time.sleep(self.seconds * random.random())
        return super().score(items)


class Calls:
    """Asks for further responses to prompts of an odd number, and drops every third prompt; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, tree: TokenTree) -> Answer:
        token, attempt = int(tree.token_id[0]), tree.meta["attempt"]
        self.calls.append((token, attempt))
        if token % 3 == 0:
            return Drop("third")
        return More(2) if token % 2 and not attempt else None


def steps_of(seconds: float = 0.0, *, counted: bool = True, over_sampling: float = 1.0) -> list[Any]:
    """Take steps with verifiers of up to ``seconds``; return all that the run did."""
    calls, sampler = Calls(), Told()
    made = controller(sampler, Budget(P, over_sampling=over_sampling), CallbackRule(calls, "calls"), counted=counted)
    trained = []
    with made.running(Late(seconds)):
        for step in range(STEPS):
            batch = made.next_batch()
            trained.append([(group.ticket, group.prompt.id, group.tree.num_leaves) for group in batch])
            made.end_step(batch, Tensors(step), step + 1)
    return [calls.calls, sampler.jobs, sampler.ends, trained, made.buffer.dropped]


@pytest.mark.parametrize("over_sampling", [1.0, 1.5])
def test_a_run_does_not_depend_on_the_time_of_verdicts(over_sampling: float) -> None:
    seen = steps_of(over_sampling=over_sampling)
    assert all(steps_of(seconds, over_sampling=over_sampling) == seen for seconds in (0.001, 0.004))
    *_, trained, dropped = seen
    assert {len(batch) for batch in trained} == {P}
    assert dropped["third"] > STEPS


def test_answers_act_while_other_groups_are_sampled() -> None:
    _, jobs, ends, _, _ = steps_of()
    first = [prompt for step, prompt, _ in jobs if step == 0]
    last = max(next(step for step, ended in ends if ended == prompt) for prompt in first)
    assert [n for step, prompt, n in jobs if step < last and prompt in first and n == 2], "no second phase has begun"
    assert [prompt for step, prompt, _ in jobs if 0 < step < last and prompt not in first], "no prompt was replaced"
    _, _, in_rounds, _, _ = steps_of(counted=False)
    assert max(ends)[0] < max(in_rounds)[0]


def test_the_sampler_goes_on_while_a_verdict_is_not_due() -> None:
    """The verdict on the first group comes only after another step of the sampler."""
    stepped = threading.Event()

    class Steps(Told):
        def step(self, seconds: float) -> list[Flight]:
            if self.ends:
                stepped.set()
            return super().step(seconds)

    class Waits(Late):
        def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
            assert stepped.wait(60)
            return super().score(items)

    made = controller(Steps(), Budget(P), CallbackRule(Calls(), "calls"), counted=True)
    with made.running(Waits(0.0)):
        assert len(made.next_batch()) == P


def test_without_a_callback_the_sampler_waits_for_no_verdict() -> None:
    """All verdicts come only after the last response."""
    late = threading.Event()

    class Waits(Late):
        def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
            assert late.wait(60)
            return super().score(items)

    class Last(Told):
        def step(self, seconds: float) -> list[Flight]:
            done = super().step(seconds)
            if not self.waiting:
                late.set()
            return done

    made = controller(Last(), Budget(P), counted=True)
    with made.running(Waits(0.0)):
        assert len(made.next_batch()) == P


def test_groups_dropped_in_a_round_are_replaced_in_the_next_with_further_responses() -> None:
    _, jobs, *_ = steps_of(counted=False)
    by_step: dict[int, list[int]] = {}
    for step, _, n in jobs:
        by_step.setdefault(step, []).append(n)
    assert any(set(sizes) == {2, 3} for sizes in by_step.values())


SLOW = """
import time

def slow(text, entry):
    time.sleep(len(text) * DELAY)
    return float(sum(map(ord, text)) % 2)
"""
toml = tiny_job(
    {f"slow{i}.py": SLOW.replace("DELAY", str(delay)) for i, delay in enumerate((0.0, 0.0002, 0.001))},
    rollout={"max_new_tokens": 24},
)


@pytest.mark.slow
def test_metrics_and_tokens_of_a_run_do_not_depend_on_the_time_of_verdicts(toml: Path, tmp_path: Path) -> None:
    def run(i: int) -> tuple[list[dict[str, float]], list[Any]]:
        flags = (
            "--loop.callback=screening", "--loop.callback_options={n=6}", "--rollout.n=2", "--trainer.steps=3",
            f"--reward.verifier={toml.parent}/slow{i}.py:slow", f"--trainer.prompts_per_step={P}",
        )  # fmt: skip
        steps = take_steps(toml, tmp_path / str(i), *flags)
        timeless = [
            {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/", "gpu/"))}
            for row in steps.rows
        ]
        return timeless, [tree.token_id.tolist() for tree in steps.trees]

    rows, tokens = run(0)
    assert sum(row["group/dropped_equal_rewards"] for row in rows) > 0
    for i in (1, 2):
        assert json.dumps(run(i)) == json.dumps((rows, tokens))
