"""Whole runs with engines, ranks and verifiers in processes of Ray, against runs of one process (`make scale`)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rolltree.engine.app.assembly import sampling as build_sampling
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.fleet import engines as engines_module
from rolltree.engine.fleet import fleet as fleet_module
from rolltree.engine.fleet import hosted as hosted_module
from rolltree.engine.fleet import shipping
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.hosted import HostedRewards
from rolltree.engine.fleet.ranks import Ranks
from rolltree.engine.fleet.workers import GoneError, LostError, Reference
from rolltree.engine.loop.orchestrator import Orchestrator
from rolltree.engine.rewards import RewardItem

from ...support.scale import Saboteur, ages, assert_close, train
from ..loop.test_durability import assert_same_run, audit, rows
from .test_scale import SEARCH, SHORT, STALE, WITHIN, no_verifier_here, strike_when_busy, when_busy

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def alone(toml: Path) -> Path:
    """The directory of the run of one process."""
    config, _ = train(toml, [f"--output_dir={toml.parent}/alone", *SHORT])
    return config.run_dir


@pytest.fixture(autouse=True)
def one_load_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers changes torch's functions while it loads a model, which threads of one process would see."""
    lock, load_model = threading.Lock(), build_sampling.load_model

    def alone(*args: Any, **options: Any) -> Any:
        with lock:
            return load_model(*args, **options)

    monkeypatch.setattr(build_sampling, "load_model", alone)


class Thing:
    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ZeroDivisionError("of the thing")

    def total(self, numbers: Reference) -> int:
        return sum(numbers.get())

    def store(self, put: Callable[[Any], Reference]) -> Reference:
        return put(np.ones(1_000_000))

    def add(self, number: int) -> list[int]:
        self.added = [*getattr(self, "added", []), number]
        return self.added


@pytest.mark.timeout(900)
def test_workers_are_processes_that_end_alone(ray: Any) -> None:
    from rolltree.engine.fleet.ray import RayWorkers

    workers = RayWorkers({"engine": ({"CPU": 1.0}, 2)})
    one, other = (workers.start("engine", i, Thing) for i in range(2))
    pids = [worker.ask("pid").result(60) for worker in (one, other)]
    assert len({*pids, os.getpid()}) == 3
    with pytest.raises(ZeroDivisionError, match="of the thing"):
        one.ask("fail").result(60)
    added = [one.ask("add", number) for number in range(200)]  # Ray itself hands them over in any order
    assert added[-1].result(60) == list(range(200))
    assert one.ask("total", workers.put([1, 2, 3])).result(60) == 6
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(LostError, match="engine 0 has ended"):
        one.ask("pid").result(60)
    one.kill()
    again = workers.start("engine", 0, Thing)  # in the same place
    assert again.ask("pid").result(60) not in pids
    assert other.ask("pid").result(60) == pids[1]
    workers.close()


def read_until_gone(reader: Any, stored: Any) -> None:
    """Read a stored value until Ray has noticed the end of its owner."""
    for _ in range(60):
        assert reader.ask("total", stored).result(60) == 1_000_000
        time.sleep(1)


@pytest.mark.timeout(900)
def test_what_a_worker_has_stored_can_be_read_until_it_ends(ray: Any) -> None:
    from rolltree.engine.fleet.ray import RayWorkers

    workers = RayWorkers({"engine": ({"CPU": 1.0}, 2)})
    owner, reader = (workers.start("engine", i, Thing) for i in range(2))
    stored = owner.ask("store", workers.put).result(60)
    assert reader.ask("total", stored).result(60) == 1_000_000
    os.kill(owner.ask("pid").result(60), signal.SIGKILL)
    with pytest.raises(LostError, match="engine 0 has ended"):
        owner.ask("pid").result(60)
    with pytest.raises(GoneError, match="what a process had stored is no more"):
        read_until_gone(reader, stored)
    assert reader.ask("pid").result(60)
    workers.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("role", "check"), [("rank", "true"), ("rank", "false"), ("engine", "true")])
def test_a_process_that_ends_while_weights_are_published(
    ray: Any, toml: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, check: str
) -> None:
    """The parts are stored and no engine has them yet."""
    left, runs = [2], list[Orchestrator]()

    def ship(weights: Any, shipper: Any, version: int, since: Any) -> Any:
        shipment = shipping.ship(weights, shipper, version, since)
        if version in left:
            left.remove(version)
            run: Any = runs[0]
            process = psutil.Process(run.learner.pids[1] if role == "rank" else run.sampler._engines[0].pid)
            process.kill()
            process.wait(60)
        return shipment

    monkeypatch.setattr(fleet_module, "ship", ship)
    processes = ["--rollout.engines=2", "--trainer.ranks=2", f"--trainer.self_check={check}"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *processes], runs.append)
    assert not left
    assert_close(config.run_dir, alone, WITHIN)
    audit(config)


@pytest.mark.timeout(900)
def test_one_process_of_ray_gives_the_bits_of_this_process(ray: Any, toml: Path, alone: Path, tmp_path: Path) -> None:
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=1"])
    assert_same_run(config.run_dir, alone)


@pytest.mark.timeout(900)
def test_an_engine_and_a_reward_host_of_ray_give_the_bits_of_this_process(
    ray: Any, toml: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (build_sampling, build_workers):
        monkeypatch.setattr(module, "make_rewards", no_verifier_here)
    arguments = ["--rollout.engines=1", "--reward.hosts=1", "--placement.layout=colocated"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *arguments])
    assert_same_run(config.run_dir, alone)


@pytest.mark.timeout(900)
def test_programs_that_judge_ask_the_reward_hosts_of_ray(
    ray: Any, toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RewardItem] = []
    ask = HostedRewards.ask

    def spy(self: HostedRewards, method: str, values: Any) -> Any:
        asked.extend(values if method == "score" else [])
        return ask(self, method, values)

    monkeypatch.setattr(HostedRewards, "ask", spy)
    arguments = [*SEARCH, "--rollout.engines=1", "--reward.hosts=1", "--rollout.max_new_tokens=12"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *arguments])
    of_programs = [item for item in asked if not item.prompt]  # which only the run itself knows
    assert 3 * config.trainer.prompts_per_step <= len(of_programs) < len(asked)
    assert sum(row.get("rollout/failed", 0) for row in rows(config.run_dir)) == 0


MOODY = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def judge(text, entry):
    with open(HERE / "pids", "a") as file:
        print(os.getpid(), file=file)
    try:
        os.close(os.open(HERE / "hung", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        time.sleep(0.01)
        return float(len(text) % 3 == 0)
    while True: pass  # the first response alone
"""


@pytest.mark.timeout(900)
def test_reward_hosts_that_are_killed_or_stopped_lose_no_verdict(
    ray: Any, toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on within stated bounds, a verifier that hangs is killed by its own pool, and no process is left."""
    monkeypatch.setattr(hosted_module, "HEALTH_S", 0.5)
    (tmp_path / "mine.py").write_text(MOODY)
    struck: list[float] = []
    noticed: list[float] = []
    replace, saboteurs = HostedRewards._replace, []

    def spy(self: HostedRewards, host: Any, why: str) -> None:
        noticed.append(time.monotonic())
        replace(self, host, why)

    def strike(run: Orchestrator, kind: signal.Signals) -> None:
        host = when_busy(lambda: [h for h in run.rewards._hosts if h.serving and h.chunks])  # type: ignore[attr-defined]
        struck.append(time.monotonic())
        os.kill(host.pid, kind)
        while len(noticed) < len(struck):
            time.sleep(0.01)

    def watch(run: Orchestrator) -> None:
        kinds = [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL]
        strikes = [(step, partial(strike, run, kind)) for step, kind in zip((2, 5, 8), kinds, strict=True)]
        saboteurs.append(Saboteur(run, strikes))
        saboteurs[0].start()

    monkeypatch.setattr(HostedRewards, "_replace", spy)
    arguments = [f"--output_dir={tmp_path}", *STALE, "--reward.hosts=2", "--trainer.steps=12"]
    arguments += [f"--reward.verifier={tmp_path}/mine.py:judge", "--reward.timeout_s=1", "--placement.hang_s=3"]
    config, _ = train(toml, arguments, watch)
    assert saboteurs[0].done == len(noticed) == 3
    assert len(audit(config)) == 12 * config.trainer.prompts_per_step
    found = rows(config.run_dir)
    assert sum(row.get("reward/failed_timeout", 0) for row in found) == 1
    assert sum(row.get("reward/failed", 0) for row in found) == 1
    assert sum(row.get("reward/asked_again", 0) for row in found) >= 3
    seconds = [b - a for a, b in zip(struck, noticed, strict=True)]
    assert max(seconds[0], seconds[2]) < 5.0
    assert 2.5 < seconds[1] < 3.0 + 0.5 + hosted_module.LOOK_S + 2.0
    pids = {int(word) for word in (tmp_path / "pids").read_text().split()}
    assert len(pids) >= 4
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.timeout(900)
def test_two_processes_of_ray_give_the_same_tokens(ray: Any, toml: Path, alone: Path, tmp_path: Path) -> None:
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=2"])
    assert_close(config.run_dir, alone, WITHIN)


@pytest.mark.timeout(1800)
def test_ranks_of_ray_learn_what_one_process_learns(ray: Any, toml: Path, alone: Path, tmp_path: Path) -> None:
    """One is killed in the second step; the run goes back, and then continues on other numbers of ranks."""
    strikes = [2]

    def watch(run: Orchestrator) -> None:
        assert isinstance(run.learner, Ranks)
        ranks, learn = run.learner, run.learner._learn

        def struck(method: str, trees: Any, given: Any, step: int, *rest: Any) -> Any:
            if step in strikes:
                strikes.remove(step)
                os.kill(ranks.pids[0], signal.SIGKILL)
            return learn(method, trees, given, step, *rest)

        run.learner._learn = struck  # type: ignore[method-assign]

    two = [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=1", "--trainer.ranks=2"]
    config, run = train(toml, two, watch)
    assert not strikes
    assert run.learner._groups == 2  # type: ignore[attr-defined]
    assert_close(config.run_dir, alone, WITHIN)
    audit(config)
    longer, _ = train(toml, [f"--output_dir={toml.parent}/longer", *SHORT, "--trainer.steps=5"])
    train(toml, [*two, "--trainer.steps=4", "--placement.cluster=auto"], resume=True)  # they meet at an address
    more, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, "--trainer.steps=5"], resume=True)
    assert_close(more.run_dir, longer.run_dir, WITHIN)


@pytest.mark.timeout(900)
def test_processes_that_are_killed_or_stopped_lose_no_group(
    ray: Any, toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "HEALTH_S", 0.5)
    saboteurs, seen = [], []

    def signal_to(number: signal.Signals, engine: Any) -> None:
        os.kill(engine.pid, number)

    def watch(run: Orchestrator) -> None:
        assert isinstance(run.sampler, Fleet)
        kinds = [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL]
        strikes = [
            (step, partial(strike_when_busy, run.sampler, partial(signal_to, kind)))
            for step, kind in zip((2, 10, 20), kinds, strict=True)
        ]
        saboteurs.append(Saboteur(run, strikes))
        saboteurs[0].start()
        seen.append(ages(run))

    arguments = [f"--output_dir={tmp_path}", *STALE, "--rollout.engines=2", "--trainer.steps=40"]
    config, _ = train(toml, [*arguments, "--placement.hang_s=3"], watch)
    assert saboteurs[0].done == 3
    assert len(audit(config)) == 40 * config.trainer.prompts_per_step
    assert sum(row.get("group/restarted_lost", 0) for row in rows(config.run_dir)) >= 3
    assert all(oldest >= started for started, oldest in seen[0])


@pytest.mark.timeout(1800)
def test_ranks_engines_and_a_reward_host_of_ray_learn_what_one_process_learns(
    ray: Any, toml: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens beyond loopback while all of them run, the ranks' own connections included."""
    for module in (build_sampling, build_workers):
        monkeypatch.setattr(module, "make_rewards", no_verifier_here)
    seen: list[dict[str, set[str]]] = []

    def watch(run: Orchestrator) -> None:
        update = run.learner.update

        def looking(*given: Any) -> bool:
            changed = update(*given)
            seen.append(listening())
            return changed

        monkeypatch.setattr(run.learner, "update", looking)

    arguments = ["--rollout.engines=2", "--trainer.ranks=2", "--reward.hosts=1"]
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *arguments], watch)
    assert_close(config.run_dir, alone, WITHIN)
    for one, other in zip(rows(config.run_dir), rows(alone), strict=True):
        for name in ("actor/grad_norm", "reward/mean", "eval/accuracy"):
            assert one.get(name) == pytest.approx(other.get(name), abs=WITHIN), name
    assert len(seen) == 3
    for addresses in seen:
        assert {"ray::RolltreeRank", "ray::RolltreeEngine", "ray::RolltreeReward"} <= {*addresses}
        assert set.union(*addresses.values()) <= {"127.0.0.1", "::1"}


def listening() -> dict[str, set[str]]:
    """The addresses on which this process, Ray's and its workers listen, by the beginning of their command lines."""
    mine = psutil.Process()
    found: dict[str, set[str]] = {}
    for process in [mine, *mine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of an earlier test has just ended
            name = "".join(process.cmdline()).partition(".")[0]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(name, set()).add(connection.laddr.ip.removeprefix("::ffff:"))
    return found


def test_nothing_listens_beyond_loopback(ray: Any) -> None:
    """The sockets of this process, of Ray's and of its workers listen on loopback alone."""
    found = listening()
    assert len(found) > 3
    assert set.union(*found.values()) <= {"127.0.0.1", "::1"}


@pytest.mark.timeout(120)
def test_a_client_with_another_token_is_refused(ray: Any) -> None:
    address = ray.get_runtime_context().gcs_address
    joins = f"import ray; ray.init('{address}', log_to_driver=False); print('joined')"
    for token, expected in ((os.environ["RAY_AUTH_TOKEN"], True), (secrets.token_hex(32), False)):
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        done = subprocess.run(
            [sys.executable, "-c", joins], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert ("joined" in done.stdout) == expected, done.stderr
