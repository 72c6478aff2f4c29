"""Simulated runs against formulas of their own: the loop's rules decide the seconds of a step, models the rates."""

from __future__ import annotations

import cProfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.errors import RunError
from rolltree.engine.fleet.workers import LostError
from rolltree.engine.loop.budget import Budget
from rolltree.engine.plan import simulate as simulate_module
from rolltree.engine.plan.modelled import MeasuredRates
from rolltree.engine.plan.simulate import LLAMA_3_FAILURES, Outcome, Scenario, Simulation, simulate
from rolltree.engine.plan.virtual import HostModel, JudgingModel, ModelledTree, VirtualWorkers
from rolltree.engine.prompts.group import Group
from rolltree.engine.prompts.prompts import Prompt
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.rollout.sampler import Job

STEP_S, TOKEN_S = 0.01, 0.002
RATES = MeasuredRates(STEP_S, TOKEN_S, prompt=1)


def equal(length: int) -> Any:
    return lambda seed, n: [length] * n


def long_tail(seed: int, n: int) -> list[int]:
    drawn = np.random.default_rng(seed % 2**63).lognormal(np.log(40), 1.0, n)
    return np.minimum(400, np.ceil(drawn)).astype(int).tolist()


def scenario(batch: int = 4, staleness: int = 0, window: float = 0.0, **given: Any) -> Scenario:
    usual: dict[str, Any] = {
        "n": 2, "prompt": 1, "lengths": equal(100), "rows": 64, "ranks": 1, "engines": 1, "engine": RATES,
        "trainer": RATES, "start_s": 1.0, "keep_keys": True,
    }  # fmt: skip
    return Scenario(Budget(batch, staleness, window), **(usual | given))


def trained(run: Simulation, steps: int) -> list[Group]:
    return [group for _ in range(steps) for group in run.step()]


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("update_s", [0.1, 0.6, 5.0])
def test_a_step_takes_as_long_as_the_bound_on_the_lag_allows(staleness: int, update_s: float) -> None:
    """A batch begins S + 1 steps before it is trained, so S + 1 steps hold one batch's sampling and one update more:
    the later of (G + U) / (S + 1) and U, with responses of one length. `Controller` finds a batch one look later."""
    rates = replace(RATES, token_s=update_s / (4 * 2 * 101))
    found = simulate(scenario(staleness=staleness, trainer=rates), steps=36, settling=6)
    sampling = 100 * STEP_S
    assert found.step_s == pytest.approx(max(update_s, (sampling + update_s) / (staleness + 1)), abs=0.06)
    assert found.update_s == pytest.approx(update_s)
    assert found.max_lag <= staleness
    assert found.trainer_waits == pytest.approx(1 - update_s / found.step_s, abs=1e-9)


def test_one_step_at_staleness_0_is_the_sum_of_its_parts() -> None:
    """8 responses of 100 tokens and a prompt of 1; three processes judge each for 0.3 s; weights take 2 and 3 s."""
    made = scenario(publish_s=2.0, load_s=3.0, judge_s=0.3, judges=3)
    found = simulate(made, steps=5, settling=2)
    expected = 100 * STEP_S + 8 * 0.3 / 3 + 8 * 101 * TOKEN_S + 2.0 + 3.0
    assert found.step_s == pytest.approx(expected, abs=2 * STEP_S)
    assert found.engines_idle == pytest.approx(1 - 100 * STEP_S / expected, abs=0.01)
    assert found.rows_idle == 1 - 8 / 64
    assert found.tokens_s == pytest.approx(800 / found.step_s)


def test_the_longest_response_decides_at_staleness_0_and_two_engines_share_the_jobs() -> None:
    lengths = count(1)
    drawn: dict[int, int] = {}

    def growing(seed: int, n: int) -> Sequence[int]:
        return [10 * drawn.setdefault(seed, next(lengths))] * n

    run = Simulation(scenario(engines=2, lengths=growing))
    with run.controller.running(None):  # type: ignore[arg-type]
        run.step()
        run.begin()
        run.step()
    assert run.outcome().step_s == pytest.approx(80 * STEP_S + 2 * (50 + 60 + 70 + 80 + 4) * TOKEN_S, abs=STEP_S)
    assert run.busy["s"] == pytest.approx((60 + 80) * STEP_S)  # one engine had 50 and 60, the other 70 and 80


def test_ranks_share_an_update_in_whole_groups() -> None:
    one, two, many = (simulate(scenario(ranks=ranks), 5, 2).update_s for ranks in (1, 2, 64))
    assert one == pytest.approx(8 * 101 * TOKEN_S)
    assert two == pytest.approx(one / 2)
    assert many == pytest.approx(one / 4)  # a batch of four groups


BUSY = {"batch": 6, "staleness": 2, "window": 0.5, "engines": 3, "lengths": long_tail, "rows": 16, "load_s": 0.2}


def test_the_same_seed_gives_the_same_output() -> None:
    first, again = (simulate(scenario(**BUSY, failures=0.05)) for _ in range(2))
    assert first == again
    assert first.lost_engines > 0
    assert simulate(scenario(**BUSY, failures=0.05, seed=1)) != first


@pytest.mark.parametrize("which", ["engine", "trainer", "load_s"])
def test_a_doubled_rate_shows(which: str) -> None:
    """The negative: the seconds of a step follow each of the rates."""
    made = scenario(**(BUSY | {"staleness": 0, "window": 0.0}))
    doubled = made.load_s * 2 if which == "load_s" else replace(RATES, step_s=2 * STEP_S, token_s=2 * TOKEN_S)
    base = simulate(made).step_s
    share = {"engine": 1 - simulate(made).update_s / base - 0.2 / base, "trainer": simulate(made).update_s / base}
    expected = base * (1 + share.get(which, 0.2 / base))
    assert simulate(replace(made, **{which: doubled})).step_s == pytest.approx(expected, rel=0.02)
    assert expected > base * 1.02


def test_all_rates_doubled_double_the_step_at_any_staleness() -> None:
    made = scenario(**BUSY)
    slow = replace(RATES, step_s=2 * STEP_S, token_s=2 * TOKEN_S)
    twice = replace(made, engine=slow, trainer=slow, load_s=2 * made.load_s, start_s=2 * made.start_s)
    assert simulate(twice, 40).step_s == pytest.approx(2 * simulate(made, 40).step_s, rel=0.02)  # but the looks


@settings(max_examples=25)
@given(
    st.integers(1, 4), st.integers(0, 3), st.floats(0, 0.9), st.integers(1, 5), st.sampled_from([0.0, 0.03, 0.2]),
    st.sampled_from([0.0, 0.5]), st.integers(0, 100),
)  # fmt: skip
def test_every_group_is_trained_once_and_none_too_late(
    engines: int, staleness: int, window: float, batch: int, failures: float, look_s: float, seed: int
) -> None:
    made = scenario(
        batch, staleness, window, engines=engines, lengths=long_tail, rows=8, failures=failures, look_s=look_s,
        seed=seed, load_s=0.1, judge_s=0.05, judges=2, restart_s=1.0, keep_keys=False,
    )  # fmt: skip
    run = Simulation(made)
    with run.controller.running(None):  # type: ignore[arg-type]
        groups = trained(run, 8)
    tickets = sorted(group.ticket for group in groups)
    assert len(set(tickets)) == len(tickets) == 8 * batch
    assert set(tickets) | set(run.buffer.open) == set(range(run.buffer.admitted))
    assert max(lag for lags in run.lags for lag in lags) <= staleness
    for group in groups:
        assert group.tree.policy_version.min() >= group.started
        assert list(group.tree.meta["lengths"]) == long_tail(_seed(made, group.ticket), 2)  # a lost one begins anew
    expected = sum(sum(long_tail(_seed(made, ticket), 2)) for ticket in tickets)
    assert run.buffer.ledger.trained == expected


def _seed(made: Scenario, ticket: int) -> int:
    block, index = divmod(ticket, made.budget.batch)
    state = np.random.SeedSequence([made.seed, block + 1]).generate_state(made.budget.batch, np.uint64)
    return int(state.astype(np.int64)[index])


@pytest.mark.parametrize("keep_keys", [True, False])
def test_keys_are_computed_again_unless_they_are_kept(keep_keys: bool) -> None:
    run = Simulation(scenario(**(BUSY | {"keep_keys": keep_keys})))
    with run.controller.running(None):  # type: ignore[arg-type]
        trained(run, 6)
    hosts: Any = [engine.worker for engine in run.fleet._engines]
    assert (sum(worker._thing.engine.recomputed for worker in hosts) == 0) == keep_keys


def test_a_lost_engine_takes_no_more_steps() -> None:
    workers, busy = VirtualWorkers(), Counter[str]()
    worker = workers.start("engine", 0, HostModel, RATES, equal(100), 1, 8, 0.0, 0.0, busy)
    worker.ask("run", {1: Job([1], SamplingParams(n=1))}, False)
    answer = worker.ask("result", 1)
    workers.wait([answer], 0.5)
    worker.kill()
    with workers.until(10.0):
        workers.wait([], None)  # the loss itself
        workers.wait([], None)
    assert workers.clock() == 10.0
    assert busy["s"] <= STEP_S
    with pytest.raises(LostError, match="engine 0 was killed"):
        answer.result(0)


def test_no_verdict_is_taken_at_staleness_0_before_all_have_come() -> None:
    workers = VirtualWorkers()
    judging = JudgingModel(workers, seconds=1.0, processes=1)
    groups = [Group(i, Prompt("", "", "", [1], {}, ""), 0) for i in range(2)]
    judging.add([(group, ModelledTree.of((3, 4), 0), None) for group in groups])
    judging.wait(9.0)
    assert workers.clock() == 2.0  # two responses, one after the other
    assert judging.take(groups) == []
    assert judging.take() == groups[:1]
    judging.wait(9.0)
    assert (workers.clock(), judging.take(groups[1:])) == (4.0, groups[1:])
    assert not judging.busy


@pytest.mark.check
def test_a_round_of_the_driver_costs_what_changed_and_not_what_is_open() -> None:
    """Four times the groups cost four times the calls; looking at all open groups in a round cost 16 times."""

    def calls(batch: int) -> int:
        run = Simulation(scenario(batch, 2, 0.25, lengths=long_tail, engines=batch // 16))
        profile = cProfile.Profile()
        with run.controller.running(None):  # type: ignore[arg-type]
            trained(run, 4)
            profile.enable()
            trained(run, 3)
            profile.disable()
        return sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]

    assert calls(256) < 1.5 * 4 * calls(64)


def test_lost_engines_cost_time_and_no_group() -> None:
    made = scenario(**BUSY, start_s=3.0)
    base, failing = simulate(made, 30), simulate(replace(made, failures=0.05), 30)
    assert (base.lost_engines, base.begun_anew) == (0, 0)
    assert failing.lost_engines > 3
    assert failing.begun_anew > 0
    assert failing.step_s > base.step_s * 1.05


def test_a_lost_rank_costs_a_restart_and_the_steps_since_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank ends in the third step; the checkpoint was saved after the second."""
    made = scenario(restart_s=50.0, save_every=2, publish_s=1.0)
    step = simulate(made, 6, 1).step_s
    run = Simulation(made)
    with run.controller.running(None):  # type: ignore[arg-type]
        trained(run, 2)
        run.begin()
        run._rank_ends_at = run.workers.clock() + step / 2
        run.step()
    assert run.outcome().lost_ranks == 1
    assert run.outcome().step_s == pytest.approx(step + 50.0 + step, rel=0.01)


def test_an_engine_that_begins_before_it_has_the_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(HostModel):
        def run(self, jobs: Any, held_out: bool = False) -> None:
            super().run({number: replace(job, version=0) for number, job in jobs.items()}, held_out)

    monkeypatch.setattr(simulate_module, "HostModel", Hasty)
    with pytest.raises(RunError, match="sampled with the weights of version 0 for a job that needs version 1"):
        simulate(scenario(load_s=0.5))


def test_a_driver_that_looks_seldom_delays_a_step_by_that_much() -> None:
    made = scenario(load_s=0.3)
    often, seldom = simulate(made), simulate(replace(made, look_s=0.5))
    assert often.step_s < seldom.step_s <= often.step_s + 1.0  # one look for the batch and one for the weights


def test_a_wait_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="none is planned"):
        VirtualWorkers().wait([], None)


def test_the_published_rate_of_failures() -> None:
    """One GPU fails once in 5.8 years; 16,384 of them 7.8 times a day."""
    assert pytest.approx(419 / 54) == LLAMA_3_FAILURES * 16384 * 86400


def test_an_outcome_has_plain_numbers() -> None:
    found = simulate(scenario(), 3, 1)
    assert Outcome(**found.as_dict()) == found  # type: ignore[arg-type]
    assert all(type(value) in (int, float) for value in found.as_dict().values())
