"""Ranks that are lost and go on with the state that was kept in memory (`trainer.mirror`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine.app.assembly import run as build
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.fleet.workers import GoneError, LostError, Reference
from rolltree.engine.loop.orchestrator import Orchestrator

from ...support.forked import Forked
from ...support.scale import assert_close, train
from ..loop.test_durability import assert_same_run, audit, rows
from . import test_ranks_run
from .test_ranks_run import KEEPING, SHORT, TWO, WITHIN, Replica, Started, alone, does, lost, once, one_at_a_time, told

__all__ = ["alone", "one_at_a_time"]
MIRROR = [*TWO, "--trainer.mirror=true"]


class Mirrored(Replica):
    def state(self) -> Any:
        test_ranks_run.act(self, "state", self.learner.updates)
        return super().state()

    def take(self, kept: Any) -> bool:
        test_ranks_run.act(self, "take", 0)
        return super().take(kept)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, one_at_a_time: None) -> Started:
    made = Started()
    monkeypatch.setattr(build, "make_workers", lambda config: made)
    monkeypatch.setattr(build_workers, "Rank", Mirrored)
    return made


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize(
    ("method", "step", "starts"),
    [
        ("update", 3, 4),
        ("updated", 2, 4),
        ("state", 4, 4),  # after the update that it would hold
        ("update", 1, 4),  # none is kept yet, so the run goes back
        ("take", 0, 6),  # while the others go on
    ],
)
def test_a_lost_rank_goes_on_after_the_last_update(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: int,
    starts: int,
) -> None:  # fmt: skip
    first, second = once(1, method, step, lost), once(0, "update", 3, lost)

    def strike(rank: Replica, now: str, at: int) -> None:
        first(rank, now, at)
        if method == "take":
            second(rank, now, at)

    does(monkeypatch, strike)
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *MIRROR])
    assert len(threads.ranks) == starts
    assert_same_run(config.run_dir, alone)
    assert ("they go on with the state in memory, of update" in told(run)) == (step != 1)
    assert ("Resuming after step" in told(run)) == (step == 1)
    audit(config)


@pytest.mark.slow
def test_a_state_that_is_gone_takes_the_run_back_to_its_checkpoint(
    toml: Path, alone: Path, threads: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def __init__(self, value: Any) -> None:
            self.left = [value]  # for the one that holds it

        def get(self) -> Any:
            if not self.left:
                raise GoneError("both nodes are gone")
            return self.left.pop()

    put = threads.put
    monkeypatch.setattr(threads, "put", lambda value: Gone(value) if hasattr(value, "parts") else put(value))
    does(monkeypatch, once(1, "update", 4, lost))
    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *MIRROR])
    assert "The state of the ranks in memory is gone. " in told(run)
    assert "Resuming after step 2." in told(run)
    assert_same_run(config.run_dir, alone)
    audit(config)


class Leaving:
    def numbers(self, count: int) -> tuple[str, np.ndarray]:
        return f"{count} numbers", np.arange(count)

    def total(self, stored: Reference) -> int:
        return int(stored.get().sum())

    def fail(self) -> None:
        raise ZeroDivisionError("of the worker")


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_what_a_worker_left_outlives_it(ray: Any) -> None:
    from rolltree.engine.fleet.ray import RayWorkers

    workers = RayWorkers({"rank": ({"CPU": 1.0}, 2)})
    one, other = (workers.start("rank", i, Leaving) for i in range(2))
    told, stored = workers.leave(one, "numbers", 1_000_000).result(300)
    assert told == "1000000 numbers"
    with pytest.raises(ZeroDivisionError, match="of the worker"):
        workers.leave(one, "fail").result(300)
    one.kill()
    with pytest.raises(LostError):
        workers.leave(one, "numbers", 3).result(300)
    assert other.ask("total", stored).result(300) == 499999500000
    workers.close()


@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_ranks_of_ray_go_on_after_the_last_update(
    ray: Any, toml: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed, then both; neither state nor rollouts pass through this process."""
    from rolltree.engine.fleet import ray as module

    def refuse(stored: Any) -> Any:
        raise AssertionError("the run's process fetches what ranks or engines left")

    monkeypatch.setattr(module._Stored, "get", refuse)
    left = {2: [1], 4: [0, 1]}

    def watch(run: Orchestrator) -> None:
        strike_in_updates(run, left, monkeypatch)

    config, run = train(toml, [f"--output_dir={tmp_path}", *SHORT, *MIRROR, "--reward.hosts=1"], watch)
    assert not left
    assert run.learner._groups == 3  # type: ignore[attr-defined]
    assert "Resuming" not in told(run)
    assert_close(config.run_dir, alone, WITHIN)
    audit(config)


def strike_in_updates(run: Orchestrator, left: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill ranks at the beginning of updates: numbers of ranks by the step."""
    learn = run.learner._learn  # type: ignore[attr-defined]

    def struck(method: str, trees: Any, demonstrations: Any, step: int, *rest: Any) -> Any:
        for rank in left.pop(step, []):
            os.kill(run.learner.pids[rank], signal.SIGKILL)  # type: ignore[attr-defined]
        return learn(method, trees, demonstrations, step, *rest)

    monkeypatch.setattr(run.learner, "_learn", struck)


@pytest.mark.slow
@pytest.mark.parametrize("strikes", [{2: [1], 4: [0]}, {3: [0, 1]}])
@pytest.mark.parametrize("of", ["", "credit"])
def test_processes_that_are_killed_change_no_bit(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_at_a_time: None, strikes: dict[int, Sequence[int]],
    of: str,
) -> None:  # fmt: skip
    """A rank, and a rank with its neighbour, against a run of two ranks without losses; FSDP's parts are uneven."""
    (tmp_path / "keeping.py").write_text(KEEPING)
    given = [*SHORT, "--trainer.steps=5", "--checkpoint.every=5", "--roles.reference={ema=0.9}"]
    given += ["--algorithm.objective_options={kl_coef=0.1}", "--trainer.self_check=false"]
    if of:
        given += [f"--algorithm.advantage={tmp_path}/keeping.py:Running"]
    left = {step: list(ranks) for step, ranks in strikes.items()}

    def watch(run: Orchestrator) -> None:
        strike_in_updates(run, left, monkeypatch)

    workers = [Forked(), Forked()]
    monkeypatch.setattr(build, "make_workers", lambda config: workers[0])
    whole, _ = train(toml, [f"--output_dir={tmp_path}/whole", *given, *TWO])
    monkeypatch.setattr(build, "make_workers", lambda config: workers[1])
    config, run = train(toml, [f"--output_dir={tmp_path}/struck", *given, *MIRROR], watch)
    assert not left
    assert len(workers[1].ranks) == 2 * (1 + len(strikes))
    assert "Resuming" not in told(run)
    assert_same_run(config.run_dir, whole.run_dir)
    assert [row["step"] for row in rows(config.run_dir)] == list(range(6))
    audit(config)
