"""A run in a cluster of Ray that grows and shrinks: its nodes are processes of this machine (`make scale`)."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltree.engine import load_config
from rolltree.engine.errors import UserError
from rolltree.engine.fleet.workers import Room

from ...support.processes import Process, forking
from ...support.scale import assert_close, train
from ...support.tiny import write_job
from ..loop.test_durability import audit, rows
from .test_kills import actors, busy, end, none_of, within
from .test_scale import WITHIN

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3600)]
LIMIT_S = 90.0
"""Seconds on an idle machine until a node has joined and its engine serves, or an engine is gone with its node; Ray
takes 15 s to notice a node that ended without a word."""
SPOT = {"num_cpus": 0, "resources": {"spot": 1}, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with a head and one node for an engine; others may join it. The rollouts of a tiny model stay on their
    node, too: Ray hands over what is smaller than this with the answer."""
    monkeypatch.setenv("RAY_max_direct_call_object_size", "1")
    import rolltree.engine.fleet.ray  # noqa: F401  keeps Ray on the loopback interface

    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from ray.cluster_utils import Cluster

    made = Cluster()
    joined(made, num_cpus=2, object_store_memory=80 << 20)
    joined(made, **SPOT)
    yield made
    made.shutdown()


def joined(cluster: Any, **node: Any) -> Any:
    """Add a node; Ray gives up after 30 s, which a busy machine exceeds."""
    for attempt in range(3):
        try:
            return cluster.add_node(**node)
        except Exception:  # Ray has no class of its own for this
            if attempt == 2:
                raise


@pytest.fixture
def drivers(cluster: Any) -> Iterator[subprocess.Popen[bytes]]:
    with forking() as process:
        yield process


def drain(cluster: Any, node: Any) -> None:
    """Announce that a node leaves, as a provider of spot nodes does through Ray."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    told = GcsClient(address=cluster.address).drain_node(
        node.node_id, reason, "preempted", int(time.time() + 600) * 1000
    )
    assert told[0], told


def test_engines_come_and_go_with_the_nodes_of_a_cluster(
    cluster: Any, drivers: subprocess.Popen[bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Engines 1 -> 4 -> 2 in one run: two are killed while the cluster grows, one node ends without a word, one is
    announced to leave. Every group is trained once, and all bits are those of a run of one process."""
    toml = write_job(tmp_path)
    exact = ["--model.batch_invariant=true", "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=1"]
    follows = [
        f"--output_dir={tmp_path}/follows", "--rollout.engines={least=1,most=4}", "--placement.per_engine={spot=1}",
        f"--placement.cluster={cluster.address}", "--trainer.steps=100000",
    ]  # fmt: skip
    config = load_config(toml, [*exact, *follows])
    driver = Process(drivers, ["train", str(toml), *exact, *follows])
    request.addfinalizer(lambda: driver.kill())

    def engines() -> list[float]:
        log = config.run_dir / "metrics.jsonl"
        return [row["perf/engines"] for row in rows(config.run_dir, whole=False)[1:]] if log.exists() else []

    def serve(number: int, steps: int) -> bool:
        assert not driver.ended(), "the run ended by itself"
        return len(engines()) >= steps and engines()[-1] == number

    limit = LIMIT_S * busy()
    within(limit, serve, 1, 2)
    for _ in range(3):
        joined(cluster, **SPOT)
    within(limit, lambda: len(actors("engine")) > 1)
    for process in actors("engine")[:2]:  # the one that serves, and one that starts
        end(process.pid)
    within(2 * limit, serve, 4, len(engines()) + 2)
    audit(config, running=True)
    ended, leaving = cluster.list_all_nodes()[1:3]
    raylet = leaving.all_processes["raylet"][0].process.pid
    (of_leaving,) = [process.pid for process in actors("engine") if process.ppid() == raylet]
    drain(cluster, leaving)
    cluster.remove_node(ended, allow_graceful=False)
    within(limit, serve, 2, len(engines()) + 2)
    assert none_of([of_leaving]), "the engine of the leaving node still runs"
    cluster.remove_node(leaving)
    within(limit, serve, 2, len(engines()) + 2)
    os.kill(driver.pid, signal.SIGTERM)
    driver.wait()
    steps = len(engines())
    assert len(audit(config)) == steps * config.trainer.prompts_per_step
    alone, _ = train(toml, [f"--output_dir={tmp_path}/alone", *exact, f"--trainer.steps={steps}"])
    assert_close(config.run_dir, alone.run_dir, 0)
    for file in sorted((alone.run_dir / "rollouts").glob("*.parquet")):
        ours, theirs = (pq.read_table(run.run_dir / "rollouts" / file.name).to_pydict() for run in (config, alone))
        assert repr(ours) == repr(theirs), file.name
    print(json.dumps({"steps": steps, "engines": engines()}))


WAITS = """
from pathlib import Path
import time

trees = 0


def waits(tree):
    global trees
    trees += 1
    if trees == {number}:
        Path("{folder}/full").touch()
        while not Path("{folder}/gone").exists():
            time.sleep(0.05)
"""


def test_rollouts_on_a_node_that_ends_are_sampled_anew(
    cluster: Any, drivers: subprocess.Popen[bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The node of the only engine ends without a word when all groups of the second step are judged and no rank has
    fetched one. They are sampled anew on another node, with the same tokens, and no rank is started anew."""
    toml = write_job(tmp_path)
    job = ["--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=3", "--trainer.steps=3"]
    groups = load_config(toml, job).trainer.prompts_per_step
    (tmp_path / "mine.py").write_text(WAITS.format(number=2 * groups, folder=tmp_path))
    arguments = [
        *job, f"--output_dir={tmp_path}/runs", "--rollout.engines={least=1,most=2}", "--trainer.ranks=2",
        "--placement.per_engine={spot=1}", f"--placement.cluster={cluster.address}",
        f"--loop.callback={tmp_path}/mine.py:waits",
    ]  # fmt: skip
    config, limit = load_config(toml, arguments), 2 * LIMIT_S * busy()
    driver = Process(drivers, ["train", str(toml), *arguments])
    request.addfinalizer(lambda: driver.kill())

    def there(name: str) -> bool:
        assert not driver.ended(), "the run ended by itself"
        return (tmp_path / name).exists()

    within(limit, there, "full")
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
    joined(cluster, **SPOT)
    (tmp_path / "gone").touch()
    within(limit, driver.ended)
    assert driver.wait() == 0
    assert len(audit(config)) == 3 * groups
    again = [row.get("group/restarted_lost", 0) for row in rows(config.run_dir)[1:]]
    assert again in ([0, groups, 0], [0, 2 * groups, 0])  # twice where they went to an engine whose end Ray told later
    assert not [*config.run_dir.glob("metrics.before-resume-*")], "the ranks have gone back"
    alone, _ = train(toml, [f"--output_dir={tmp_path}/alone", *job])
    assert_close(config.run_dir, alone.run_dir, WITHIN)


def test_the_state_of_ranks_outlives_a_node_but_not_two(
    cluster: Any, drivers: subprocess.Popen[bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ranks on two nodes of three: one node ends, and its rank goes on elsewhere with the state on the other; then both
    end, and the run goes back to its checkpoint, the only one that ever sets rows aside."""
    toml = write_job(tmp_path)
    arguments = [
        f"--output_dir={tmp_path}/runs", "--rollout.engines=1", "--trainer.ranks=2", "--trainer.mirror=true",
        "--placement.per_rank={spot=1}", f"--placement.cluster={cluster.address}", "--trainer.timeout_s=30",
        "--evaluation.problems=0", "--evaluation.every=0", "--checkpoint.every=100000", "--trainer.steps=100000",
    ]  # fmt: skip
    config, limit = load_config(toml, arguments), 2 * LIMIT_S * busy()
    joined(cluster, **SPOT)
    driver = Process(drivers, ["train", str(toml), *arguments])
    request.addfinalizer(lambda: driver.kill())

    def aside() -> int:
        assert not driver.ended(), "the run ended by itself"
        return len([*config.run_dir.glob("metrics.before-resume-*")])

    def steps() -> int:
        log = config.run_dir / "metrics.jsonl"
        return len(rows(config.run_dir, whole=False)) if log.exists() and not aside() else 0

    def of_ranks() -> list[Any]:
        pids = {process.ppid() for process in actors("rank")}
        return [node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid in pids]

    within(limit, lambda: steps() > 3)
    joined(cluster, **SPOT)
    cluster.remove_node(of_ranks()[0], allow_graceful=False)
    before = steps()
    within(limit, lambda: steps() > before + 2)
    assert not aside()
    for _ in range(2):
        joined(cluster, **SPOT)
    for node in of_ranks():
        cluster.remove_node(node, allow_graceful=False)
    within(limit, aside)
    os.kill(driver.pid, signal.SIGTERM)
    driver.wait()
    audit(config, running=True)


def test_a_run_begins_with_room_for_the_smallest_number(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltree.engine.fleet import ray as module

    monkeypatch.setattr(module, "PLACED_S", 1.0)
    needs: Any = {"engine": ({"CPU": 1.0}, 9)}  # where there is room for 8
    workers = module.RayWorkers(needs, "auto", least={"engine": 8})
    assert workers.rooms("engine", 9).count(Room.FOUND) == 8
    workers.close()
    with pytest.raises(UserError, match=r"no room for the workers of the run \(9 x {'CPU': 1.0}\)"):
        module.RayWorkers(needs, "auto", least={"engine": 9})
    assert {group["state"] for group in module.placement_group_table().values()} == {"REMOVED"}
