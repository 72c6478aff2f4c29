"""Whole runs with engines in threads, against runs of one process; those in processes of Ray: `test_scale_ray.py`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltree.engine import load_config
from rolltree.engine.app.assembly import run as build
from rolltree.engine.app.assembly import sampling as build_sampling
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.host import Host
from rolltree.engine.fleet.hosted import HostedRewards, RewardHost
from rolltree.engine.fleet.workers import InThreads, Reference
from rolltree.engine.learn.learner import Learner
from rolltree.engine.loop.orchestrator import Orchestrator

from ...support.scale import Saboteur, ages, assert_close, train
from ..loop.test_durability import assert_same_run, audit, rows

SHORT = ["--evaluation.problems=4", "--evaluation.every=2", "--trainer.steps=3", "--checkpoint.every=3"]
STALE = [
    "--loop.staleness=1", "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1",
    "--rollout.max_new_tokens=40", "--algorithm.advantage=group_norm",
]  # fmt: skip
WITHIN = 2e-5


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


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> InThreads:
    """Workers in threads, which runs use instead of Ray."""
    made = InThreads()
    monkeypatch.setattr(build, "make_workers", lambda config: made)
    return made


# -- in threads -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_engine_elsewhere_gives_the_bits_of_one_process(
    toml: Path, alone: Path, threads: InThreads, tmp_path: Path
) -> None:
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=1"])
    assert_same_run(config.run_dir, alone)


@pytest.mark.check
def test_an_engine_that_is_sent_what_changed_gives_the_bits_of_one_process(
    toml: Path, threads: InThreads, tmp_path: Path
) -> None:
    """A model in bf16, of which a small update changes few bits."""
    keys = [*SHORT, "--model.dtype=bfloat16", "--trainer.lr=1e-5"]
    alone, _ = train(toml, [f"--output_dir={tmp_path}/alone", *keys])
    keys += ["--rollout.engines=1", "--rollout.send_changes=true"]
    config, _ = train(toml, [f"--output_dir={tmp_path}/sent", *keys])
    assert_same_run(config.run_dir, alone.run_dir)
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()[1:]
    shares = [json.loads(line)["perf/weights_sent"] for line in lines]
    assert all(0 < share < 0.7 for share in shares[1:])


@pytest.mark.check
def test_two_engines_give_the_same_tokens(toml: Path, alone: Path, threads: InThreads, tmp_path: Path) -> None:
    config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=2"])
    assert_close(config.run_dir, alone, WITHIN)


@pytest.mark.slow
def test_an_engine_that_keeps_its_first_weights_is_found(
    toml: Path, alone: Path, threads: InThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative: it names the new version and samples with old weights."""

    def pretend(self: Host, buckets: Any, version: int, keep_keys: bool = False, since: int | None = None) -> Any:
        return self.call(lambda: setattr(self.engine, "policy_version", version) or version)

    monkeypatch.setattr(Host, "load", pretend)
    arguments = [f"--output_dir={tmp_path}", *SHORT, "--rollout.engines=2"]
    with pytest.raises(RunError, match="holds other weights than were sent"):
        train(toml, arguments)
    config, _ = train(toml, [*arguments, "--name=unchecked", "--trainer.self_check=false"])
    with pytest.raises(AssertionError):
        assert_close(config.run_dir, alone, WITHIN)


class Slow(InThreads):
    """Weights take a while to fetch."""

    def put(self, value: Any) -> Reference:
        inner = super().put(value)

        class Late:
            def get(self) -> Any:
                time.sleep(0.2)
                return inner.get()

        return Late()


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_no_token_is_older_than_its_group(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Loads are late; the negative: without the hosts' wait for the version, older tokens appear."""
    monkeypatch.setattr(build, "make_workers", lambda config: Slow())
    if not waits:
        submit = Fleet.submit

        def of_any_version(self: Fleet, jobs: Any) -> Any:
            before, self._version = self._version, 0
            try:
                return submit(self, jobs)
            finally:
                self._version = before

        monkeypatch.setattr(Fleet, "submit", of_any_version)
    seen: list[list[tuple[int, int]]] = []
    arguments = [f"--output_dir={tmp_path}", *STALE, "--rollout.engines=2", "--trainer.steps=6"]
    arguments += ["--trainer.self_check=false"]  # it waits for the loads
    config, _ = train(toml, arguments, lambda run: seen.append(ages(run)))
    assert len(seen[0]) == 6 * config.trainer.prompts_per_step
    assert any(started for started, _ in seen[0])
    assert all(oldest >= started for started, oldest in seen[0]) == waits
    if waits:
        assert max(row.get("policy/lag", 0) for row in rows(config.run_dir)) <= 1


@pytest.mark.check
def test_engines_that_end_in_the_middle_lose_no_group(toml: Path, tmp_path: Path, threads: InThreads) -> None:
    saboteurs = []

    def watch(run: Orchestrator) -> None:
        assert isinstance(run.sampler, Fleet)
        strikes = [(step, partial(strike_when_busy, run.sampler, kill_worker)) for step in (1, 3, 5)]
        saboteurs.append(Saboteur(run, strikes))
        saboteurs[0].start()

    arguments = [f"--output_dir={tmp_path}", *STALE, "--rollout.engines=2", "--trainer.steps=8"]
    config, _ = train(toml, arguments, watch)
    assert saboteurs[0].done == 3
    assert len(audit(config)) == 8 * config.trainer.prompts_per_step
    assert sum(row.get("group/restarted_lost", 0) for row in rows(config.run_dir)) >= 1


@pytest.mark.slow
def test_reward_hosts_give_the_bits_of_one_process(
    toml: Path, alone: Path, threads: InThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are equal with an engine in another process and without; all verdicts come from the hosts."""
    hosts = kept_hosts(monkeypatch)
    for module in (build_sampling, build_workers):
        monkeypatch.setattr(module, "make_rewards", no_verifier_here)
    for engines, count in ((1, 1), (0, 2)):
        arguments = [f"--name={engines}", f"--rollout.engines={engines}", f"--reward.hosts={count}"]
        config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *arguments])
        assert_same_run(config.run_dir, alone)
    assert len(hosts) == 3
    for host in hosts:  # a thread cannot be killed; a process ends and takes them along
        host.rewards.close()


@pytest.mark.slow
def test_colocated_engines_sleep_during_updates_and_give_the_bits_of_one_process(
    toml: Path, alone: Path, threads: InThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host] = []
    make, update, states = build_workers.engine_host, Learner.update, []

    def kept(config: Any) -> Host:
        hosts.append(make(config))
        return hosts[-1]

    def spy(self: Learner, *given: Any) -> bool:
        states.append([host.engine._asleep for host in hosts])  # type: ignore[attr-defined]
        return update(self, *given)

    monkeypatch.setattr(build_workers, "engine_host", kept)
    monkeypatch.setattr(Learner, "update", spy)
    for layout in ("colocated", "split"):
        arguments = [f"--name={layout}", "--rollout.engines=1", f"--placement.layout={layout}"]
        config, _ = train(toml, [f"--output_dir={tmp_path}", *SHORT, *arguments])
        assert_same_run(config.run_dir, alone)
        assert states == [[layout == "colocated"]] * 3
        states.clear()
        hosts.clear()


def test_the_plan_tells_where_the_work_is(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = build_workers.importlib.util.find_spec
    monkeypatch.setattr(build_workers.importlib.util, "find_spec", lambda name: name == "ray" or find(name))
    given = ["--reward.hosts=2", "--reward.workers=3", "--rollout.engines=1", "--placement.layout=colocated"]
    plan = "\n".join(plan_lines(load_config(toml, given)))
    assert "in 3 processes, at each of 2 reward hosts" in plan
    assert "reward hosts       2 processes of Ray on this machine" in plan
    assert "engines            1 processes of Ray on this machine, asleep during updates" in plan


def no_verifier_here(*args: Any) -> None:
    raise AssertionError("the run's process judges itself")


def kept_hosts(monkeypatch: pytest.MonkeyPatch) -> list[RewardHost]:
    """A list that gets the objects of all reward hosts in threads."""
    made: list[RewardHost] = []

    class Kept(RewardHost):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(build_workers, "HostedRewards", partial(HostedRewards, make=Kept))
    return made


SEARCH = [
    *("--loop.staleness=0", "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1"),
    *("--rollout.program=mcts", "--rollout.program_options={segment_tokens=4,branch=2,expansions=3,max_depth=3}"),
    *("--trainer.steps=3", "--algorithm.advantage=group_norm"),
]


@pytest.mark.slow
def test_programs_that_judge_ask_the_reward_hosts(
    toml: Path, threads: InThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process has no verifier; the end of a host is no loss to such programs either."""
    hosts, seen = kept_hosts(monkeypatch), []
    for module in (build_sampling, build_workers):
        monkeypatch.setattr(module, "make_rewards", no_verifier_here)
    answer = Host.answer

    def spy(self: Host, values: Any) -> None:
        seen.extend(values.values())
        if len(seen) == 1:
            run.rewards._hosts[0].worker.kill()  # type: ignore[attr-defined]
        answer(self, values)

    def watch(given: Orchestrator) -> None:
        nonlocal run
        run = given

    run: Orchestrator
    monkeypatch.setattr(Host, "answer", spy)
    arguments = [*SEARCH, "--rollout.engines=1", "--reward.hosts=1", "--rollout.max_new_tokens=12"]
    config, run = train(toml, [f"--output_dir={tmp_path}", *arguments], watch)
    files = sorted((config.run_dir / "rollouts").glob("*.parquet"))
    trained = [set(pq.read_table(file, columns=["group"])["group"].to_pylist()) for file in files]
    assert [len(groups) for groups in trained] == [config.trainer.prompts_per_step] * 3
    assert len(set.union(*trained)) == 3 * config.trainer.prompts_per_step
    assert len(seen) >= 3 * config.trainer.prompts_per_step
    assert {0.0, 1.0} >= set(seen)
    assert len(hosts) == 2
    for host in hosts:
        host.rewards.close()


def when_busy(find: Callable[[], list[Any]]) -> Any:
    """Return the first that ``find`` finds, as soon as there is one."""
    while not (found := find()):
        time.sleep(0.001)
    return found[0]


def strike_when_busy(fleet: Fleet, strike: Callable[[Any], object]) -> None:
    """Strike an engine that has jobs."""
    strike(when_busy(lambda: [engine for engine in list(fleet._engines) if engine.serving and engine.jobs]))


def kill_worker(engine: Any) -> None:
    engine.worker.kill()


@pytest.mark.parametrize("key", ["rollout.engines", "reward.hosts"])
def test_without_ray_asking_for_processes_is_one_sentence(
    toml: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    find = build_workers.importlib.util.find_spec
    monkeypatch.setattr(build_workers.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(UserError, match=rf"{key} = 1 needs Ray.*install rolltree\[ray\]"):
        train(toml, [f"--output_dir={toml.parent}/none", f"--{key}=1"])
    assert not (toml.parent / "none").exists()
