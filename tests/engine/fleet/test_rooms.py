"""The fleet over made-up engines in a cluster that grows and shrinks when the test says so."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.app.assembly import run as build
from rolltree.engine.errors import RunError
from rolltree.engine.fleet import engines as engines_module
from rolltree.engine.fleet.workers import InThreads, Room
from rolltree.engine.loop.orchestrator import Orchestrator

from ...support.scale import Saboteur, ages, train
from ..loop.test_durability import audit, rows
from .test_fleet import Stage, Weights, answers, finish_all, fleet, job, steps
from .test_scale import STALE, kill_worker, one_load_at_a_time, strike_when_busy  # noqa: F401  a fixture

NONE, LEAVING = Room.NONE, Room.LEAVING


def stage_with(**room: Room) -> Stage:
    stage = Stage()
    stage.room = {int(name[1:]): state for name, state in room.items()}
    return stage


def test_an_engine_that_joins_loads_the_newest_weights_before_its_first_job() -> None:
    with fleet(3, stage=stage_with(_1=NONE, _2=NONE), least=1) as (made, stage):
        assert len(stage.made) == 1
        made.load(Weights(1), 1, keep_keys=False)
        finish_all(stage)
        del stage.room[1]
        steps(made, 5, 1.0)
        joined = stage.made[1]
        flights = made.submit([job(1), job(2)])
        stage.drain()
        assert joined.loads
        assert not joined.runs
        made.load(Weights(2), 2, keep_keys=False)  # while it loads the first
        finish_all(stage)
        made.step(1.0)
        flights += made.submit([job(3), job(4)])
        stage.drain()
        assert len(joined.runs) == 1
        assert joined.weights == 2.0
        while not all(flight.done for flight in flights):
            finish_all(stage)
            made.step(1.0)
        assert answers(flights) == [1, 2, 3, 4]
        assert [flight.begun_anew for flight in flights] == [0] * 4


def test_an_engine_whose_node_is_to_leave_ends_with_its_last_job() -> None:
    with fleet(2, least=1) as (made, stage):
        flights = made.submit([job(1), job(2)])
        stage.room[0] = LEAVING
        steps(made, 2, 1.0)
        flights += made.submit([job(3), job(4), job(5, near=0)])
        stage.drain()
        leaving, other = stage.made
        assert [len(leaving.jobs), len(other.jobs)] == [1, 4]
        made.load(Weights(1), 1, keep_keys=False)
        finish_all(stage)
        steps(made, 3, 1.0)
        assert [flight.begun_anew for flight in flights] == [0] * 5
        assert stage.workers[0]._killed  # type: ignore[attr-defined]
        stage.room[0] = NONE
        steps(made, 2, 1.0)
        assert len(stage.made) == 2
        stage.room.clear()
        steps(made, 3, 1.0)
        assert len(stage.made) == 3
        assert made.tally["engines_joined"] - made.tally["engines_left"] == 1
        finish_all(stage)
        made.step(1.0)
        assert made.tally["engines_joined"] - made.tally["engines_left"] == 2


def test_a_node_that_stays_after_all_gets_jobs_again() -> None:
    with fleet(2, least=1) as (made, stage):
        made.submit([job(1), job(2)])
        for room in (LEAVING, Room.FOUND):
            stage.room[0] = room
            steps(made, 2, 1.0)
        stage.drain()
        stage.made[1].finish(2)
        made.submit([job(3), job(4, n=3)])
        stage.drain()
        assert [len(one.jobs) for one in stage.made] == [2, 1]


def test_jobs_of_an_engine_whose_room_is_gone_begin_anew_and_none_takes_its_place() -> None:
    with fleet(3, restarts=1, least=1) as (made, stage):
        flights = made.submit([job(seed) for seed in range(6)])
        stage.drain()
        stage.workers[0].kill()  # as the process ends before Ray knows of the node's end
        made.step(1.0)
        stage.room |= {0: NONE, 1: NONE}
        for _ in range(5):
            made.step(1.0)
        started = len(stage.made)
        while not all(flight.done for flight in flights):
            finish_all(stage)
            made.step(1.0)
        assert len(stage.made) == started
        assert answers(flights) == list(range(6))
        assert [flight.begun_anew == 0 for flight in flights].count(True) == 2  # those of the third


@pytest.mark.parametrize("restarts", [1, 2])
def test_many_losses_of_one_engine_end_the_run_and_one_of_each_does_not(restarts: int) -> None:
    with fleet(4, restarts=restarts, least=1) as (made, stage):
        for index in range(4):
            stage.workers[index].kill()
            made.submit([job(index)])
            steps(made, 3, 1.0)
        for _ in range(restarts - 1):
            stage.workers[2].kill()
            steps(made, 8, 1.0)
        stage.workers[2].kill()
        with pytest.raises(
            RunError, match=rf"{restarts + 1} rollout engines, all of them number 2, were lost since the"
        ):
            steps(made, 8, 1.0)


def test_below_the_smallest_number_no_job_begins_and_the_console_tells() -> None:
    told: list[str] = []
    with fleet(3, stage=stage_with(_2=NONE), least=2, note=told.append) as (made, stage):
        begun = made.submit([job(1), job(2)])
        stage.drain()
        stage.room[0] = NONE
        steps(made, 3, 1.0)
        waiting = made.submit([job(3)])
        for _ in range(30):
            finish_all(stage)
            made.step(10.0)
        assert [flight.done for flight in (*begun, *waiting)].count(False) == 2  # the dropped one and the new one
        stage.room = {0: NONE}
        while not all(flight.done for flight in (*begun, *waiting)):
            finish_all(stage)
            made.step(1.0)
    of_them = "of 2 to 3 rollout engines (rollout.engines)"
    assert told == [
        f"The cluster has room for 2 {of_them}.",
        f"The cluster has room for 1 {of_them}; the run waits until it has room for 2.",
        f"The cluster has room for 2 {of_them}.",
    ]


class Growing(InThreads):
    """Rooms for engines in threads, of which the first is there from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.room = [Room.FOUND, NONE, NONE, NONE]

    def rooms(self, role: Any, count: int) -> list[Room]:
        return self.room


@pytest.mark.slow
def test_engines_that_come_and_go_in_a_run_lose_no_group(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At staleness 1, while engines sample during updates: 1 -> 4 -> 2, and one is killed while the fleet grows."""
    workers, saboteurs, seen = Growing(), [], []
    monkeypatch.setattr(build, "make_workers", lambda config: workers)
    monkeypatch.setattr(engines_module, "HEALTH_S", 0.25)

    def become(run: Orchestrator, *room: Room) -> None:
        workers.room[:] = room
        while len(run.sampler._engines) != room.count(Room.FOUND):  # type: ignore[attr-defined]
            time.sleep(0.001)

    def watch(run: Orchestrator) -> None:
        strikes = [
            (2, partial(become, run, *[Room.FOUND] * 4)),
            (3, partial(strike_when_busy, run.sampler, kill_worker)),
            (12, partial(become, run, NONE, LEAVING, Room.FOUND, Room.FOUND)),
            (16, partial(become, run, NONE, NONE, Room.FOUND, Room.FOUND)),
        ]
        saboteurs.append(Saboteur(run, strikes))
        saboteurs[0].start()
        seen.append(ages(run))

    arguments = [f"--output_dir={tmp_path}", *STALE, "--rollout.engines={least=1,most=4}", "--trainer.steps=24"]
    config, _ = train(toml, arguments, watch)
    assert saboteurs[0].done == 4
    assert len(audit(config)) == 24 * config.trainer.prompts_per_step
    serving = [row["perf/engines"] for row in rows(config.run_dir)[1:]]
    assert (serving[0], max(serving), serving[-1]) == (1, 4, 2)
    assert sum(row.get("group/restarted_lost", 0) for row in rows(config.run_dir)) >= 1
    assert all(oldest >= started for started, oldest in seen[0])
