"""One run whose processes are killed or stopped at random moments: the driver, ranks, engines, reward hosts.

One Ray outlives the drivers. After each kill the run is audited, and what it took to notice and to go on is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from rolltree.engine import load_config
from rolltree.engine.settings import TrainConfig

from ...support.processes import Process, forking
from ...support.tiny import write_job
from ..loop.test_durability import audit, repair_as_resuming_does, rows

HANG_S, RANKS_S, START_S = 3.0, 10.0, 60.0
"""Limits of the run on an idle machine: `placement.hang_s`, `trainer.timeout_s` and `placement.start_s`."""
NOTICED_S, NEXT_STEP_S, GONE_S = 10.0, 60.0, 10.0
"""Seconds on an idle machine from a kill until another process has taken the place, until the next step but one has
ended, and until the processes of a killed driver are gone. A driver's successor starts five processes; each rank and
engine takes 10 s of a core to import PyTorch and Transformers, and a reward host 4 s."""
YOUNG_S = 60.0
"""Age on an idle machine up to which a process may be starting."""
KILLED = {
    "driver": [signal.SIGKILL],
    "engine": [signal.SIGKILL, signal.SIGSTOP],
    "rank": [signal.SIGKILL, signal.SIGSTOP],
    "reward": [signal.SIGKILL, signal.SIGSTOP],
}


@pytest.fixture(scope="module")
def drivers(ray: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks the drivers, which has the token of Ray."""
    with forking() as process:
        yield process


def actors(role: str | None = None, but: Collection[int] = ()) -> list[psutil.Process]:
    """The running workers of a role, or of any; a driver's are all."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            called = f"ray::Rolltree{role.capitalize() if role in ('engine', 'rank', 'reward') else ''}"
            if process.pid not in but and "".join(process.cmdline()).startswith(called):
                found.append(process)
    return found


def within(seconds: float, true: Callable[..., object], *given: Any) -> float:
    """Wait until ``true(*given)``; return the seconds that it took."""
    begin = time.monotonic()
    while not true(*given):
        assert time.monotonic() - begin < seconds, f"not after {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begin


def busy() -> float:
    """Return how often the processes that want to run would fill the cores; all limits are multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def none_of(pids: list[int]) -> bool:
    return not any(map(psutil.pid_exists, pids))


def run_command(directory: Path, ray: Any, hang_s: float, ranks_s: float, start_s: float) -> list[str]:
    """The command of a run that does not end, with two ranks, two engines and a reward host on this Ray."""
    return [
        "train", str(write_job(directory)), f"--output_dir={directory}/runs", "--rollout.engines=2", "--reward.hosts=1",
        f"--placement.cluster={ray.get_runtime_context().gcs_address}", f"--placement.hang_s={hang_s:.0f}",
        "--placement.restarts=20", f"--placement.start_s={start_s:.0f}", "--trainer.ranks=2",
        f"--trainer.timeout_s={ranks_s:.0f}", "--loop.staleness=1", "--evaluation.problems=0", "--evaluation.every=0",
        "--checkpoint.every=1", "--checkpoint.keep=20", "--rollout.max_new_tokens=40", "--trainer.steps=100000",
        "--algorithm.advantage=group_norm",
    ]  # fmt: skip


@pytest.mark.ray
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_kills_of_any_process_lose_no_group(
    ray: Any, drivers: subprocess.Popen[bytes], tmp_path: Path, kills: int, request: pytest.FixtureRequest
) -> None:
    hang_s, ranks_s, start_s = (limit * busy() for limit in (HANG_S, RANKS_S, START_S))
    moment = random.Random(kills)
    command = run_command(tmp_path, ray, hang_s, ranks_s, start_s)
    config = load_config(command[1], command[2:])
    directory = config.run_dir
    seconds: dict[str, list[float]] = {}

    def steps() -> int:
        return len(rows(directory, whole=False)) if (directory / "metrics.jsonl").exists() else 0

    def goes_on(driver: Process, before: int) -> bool:
        assert not driver.ended(), "the run ended by itself"
        return steps() > before

    def note(what: str, value: float) -> None:
        seconds.setdefault(what, []).append(round(value, 2))
        (tmp_path / "seconds.json").write_text(json.dumps(seconds))

    driver = Process(drivers, command)
    request.addfinalizer(lambda: driver.kill())
    within(2 * NEXT_STEP_S * busy(), goes_on, driver, 2)
    for number in range(kills):
        role = [*KILLED][number % 4] if kills < 10 else moment.choice([*KILLED, "engine"])
        kind = KILLED[role][-1 if moment.random() < 0.4 or number == 1 else 0]
        within(start_s, actors, role)
        within(NEXT_STEP_S * busy(), goes_on, driver, steps())
        time.sleep(moment.uniform(0, 0.5))
        before, begin = steps(), time.monotonic()
        chosen = None if role == "driver" else moment.choice(actors(role))
        unseen_s, young = 0.0, False
        if kind == signal.SIGSTOP:
            chosen = min(actors(role), key=psutil.Process.create_time)
            young = time.time() - chosen.create_time() < YOUNG_S * busy()  # then the limit of a start may apply
            unseen_s = 10 + (start_s if young else ranks_s if role == "rank" else hang_s)
        if chosen is None:
            its = [p.pid for worker in actors() for p in [worker, *worker.children(recursive=True)]]
            assert len(its) > 3
            os.kill(driver.pid, kind)
            assert driver.wait() == -kind
            note("gone", within(GONE_S * busy(), none_of, its))
            repair_as_resuming_does(directory, config)
            audit(config)
            driver = Process(drivers, [*command, "--resume"])
        else:
            known = {process.pid for process in actors()}
            os.kill(chosen.pid, kind)
            took = within(NOTICED_S * busy() + unseen_s, actors, None, known)
            note(f"{role} {kind.name}{' while young' * young} noticed", took)
        within(NEXT_STEP_S * busy() + unseen_s, goes_on, driver, before + 1)
        note(f"{role} {kind.name} next step", time.monotonic() - begin)
        note("load", os.getloadavg()[0])
        audit(config, running=True)
    os.kill(driver.pid, signal.SIGTERM)  # it ends its step and saves
    driver.wait()
    trained = audit(config)
    found = rows(directory)
    assert [row["step"] for row in found] == list(range(len(found)))
    assert len(trained) == (len(found) - 1) * config.trainer.prompts_per_step
    again = {key: sum(row.get(key, 0) for row in found) for key in ("group/restarted_lost", "reward/asked_again")}
    print(json.dumps({"steps": len(found), **again, **seconds}))
    if kills >= 10:
        assert again["group/restarted_lost"] >= kills / 10, "no engine had unfinished groups; the test shows little"
    check_the_audit(config)


@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("role", ["engine", "rank", "reward"])
def test_a_process_that_stops_while_it_starts_is_replaced(
    ray: Any, drivers: subprocess.Popen[bytes], tmp_path: Path, role: str, request: pytest.FixtureRequest
) -> None:
    limit = START_S * busy() / 2
    command = run_command(tmp_path, ray, HANG_S * busy(), RANKS_S * busy(), limit)
    config = load_config(command[1], command[2:])
    driver = Process(drivers, command)
    request.addfinalizer(lambda: driver.kill())

    def starting() -> list[psutil.Process]:
        return [actor for actor in actors(role) if "__init__" in "".join(actor.cmdline())]

    def steps() -> int:
        return len(rows(config.run_dir, whole=False)) if (config.run_dir / "metrics.jsonl").exists() else 0

    within(2 * NEXT_STEP_S * busy(), lambda: steps() > 1)
    end(random.choice(actors(role)).pid)
    within(NOTICED_S * busy(), starting)
    chosen, before, known = starting()[0], steps(), {actor.pid for actor in actors()}
    chosen.suspend()
    stopped = time.monotonic()
    within(limit + 10 + NOTICED_S * busy(), lambda: none_of([chosen.pid]))
    took = time.monotonic() - stopped
    least = RANKS_S if role == "rank" else limit / 2  # the other rank waits for it no longer than its own limit
    assert took > least, "the stopped process was replaced for another reason than its start"
    within(NOTICED_S * busy(), actors, None, known)
    within(NEXT_STEP_S * busy(), lambda: driver.ended() or steps() > before + 1)
    assert not driver.ended()
    print(json.dumps({"role": role, "limit": limit, "replaced": took, "next step": time.monotonic() - stopped}))
    audit(config, running=True)


def check_the_audit(config: TrainConfig) -> None:
    """The negatives: the audit finds a batch that was trained twice, a lost group and a lost response."""
    *_, before, last = sorted((config.run_dir / "rollouts").glob("*.parquet"))
    kept = pq.read_table(last)
    shutil.rmtree(last)  # the ranks' parts, in whose place is one file
    pq.write_table(pq.read_table(before), last)
    with pytest.raises(AssertionError, match="trained twice"):
        audit(config)
    first = kept["group"][0]
    for wrong in (kept.filter([group != first for group in kept["group"]]), kept.slice(1)):
        pq.write_table(wrong, last)
        with pytest.raises(AssertionError):
            audit(config)
    pq.write_table(kept, last)
    audit(config)
