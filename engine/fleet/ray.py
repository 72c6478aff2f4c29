"""Workers that are processes of a Ray cluster, or of this machine. This is the only module that imports Ray.

Without a cluster Ray is started on this machine and listens on the loopback interface alone. Every client needs the
token of the cluster, which is made anew for a run. Every worker has its place in one placement group, where it is
started again after its end. Workers whose number follows the cluster have groups of their own, one each: Ray finds room
for such a group when nodes join, tells its autoscaler of those without, and looks for another node when one leaves.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .workers import AskedWorker, Calls, GoneError, LostError, Reference, Role, Room, Worker, settle

ATTEMPTS = 3
"""Attempts to start Ray on this machine: it gives up after 15 s without its agents, which a busy machine exceeds."""
AT_ONCE = 10_000
"""Most calls of one worker that are under way: each unfinished job of an engine is one."""
PLACED_S = 300.0
"""Seconds that a cluster may take to find room for all workers, for example while nodes are added."""
LOOK_S = 0.2
"""Seconds between two requests for the state of that room."""

# Ray reads these when it is imported. The first keeps it on the loopback interface: it decides that the nodes of a
# cluster are all on this machine, as on Windows and macOS. The last lets workers have their share of the cores: as Ray
# starts them (niceness 15), other programs of the machine keep them from starting in `placement.start_s`.
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray  # noqa: E402
from ray._raylet import GcsClient  # noqa: E402  nothing public tells which nodes are to leave
from ray.exceptions import (  # noqa: E402
    NodeDiedError,
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import (  # noqa: E402
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, OwnerDiedError)
"""Errors of Ray that mean that a worker, or what it stored, is no more."""


class RayWorkers:
    """Workers of a run in processes; see `Workers`.

    Args:
        needs: for each role the resources of one worker and their number, for example ``({"CPU": 1.0}, 2)``.
        cluster: address of a running cluster, or "auto" for the one of this machine; empty to start Ray here.
        python: for each role the interpreter of its workers; empty or left out: that of this process.
        least: for each role whose number follows the cluster the smallest one; that in ``needs`` is the largest.

    Raises:
        UserError: the cluster cannot be reached, or has no room for all workers, or the smallest number of them.
    """

    def __init__(
        self,
        needs: Mapping[Role, tuple[Mapping[str, float], int]],
        cluster: str = "",
        python: Mapping[Role, str] | None = None,
        least: Mapping[Role, int] | None = None,
    ) -> None:
        self._python, least = dict(python or {}), least or {}
        self._resources = {role: dict(resources) for role, (resources, _) in needs.items()}
        counts = {role: least.get(role, count) for role, (_, count) in needs.items()}
        if not ray.is_initialized():
            _connect(cluster, [self._resources[role] for role, count in counts.items() for _ in range(count)])
        self._gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        self._places: dict[tuple[Role, int], tuple[PlacementGroup, int]] = {}  # of each worker: group, bundle in it
        self._groups: list[PlacementGroup] = []
        fixed = [(role, index) for role, count in counts.items() if role not in least for index in range(count)]
        if fixed:
            self._add_group(fixed)
        placed = all(group.wait(PLACED_S if cluster else 60.0) for group in self._groups)
        for role in least if placed else ():
            for index in range(needs[role][1]):
                self._add_group([(role, index)])
        until = time.monotonic() + (PLACED_S if cluster else 60.0)
        while placed and any(self.rooms(role, needs[role][1]).count(Room.FOUND) < least[role] for role in least):
            time.sleep(LOOK_S)
            placed = time.monotonic() < until
        if not placed:
            self._remove_groups()
            needed = ", ".join(f"{count} x {self._resources[role]}" for role, count in counts.items())
            raise UserError(
                f"Ray has no room for the workers of the run ({needed}) among {ray.cluster_resources()}; ask for "
                "less in rollout.engines, trainer.ranks, reward.hosts and [placement], or add nodes."
            )
        self._started: list[_RayWorker] = []

    def _add_group(self, workers: Sequence[tuple[Role, int]]) -> None:
        """Ask for room for some workers together."""
        group = placement_group([self._resources[role] for role, _ in workers], strategy="PACK")
        self._groups.append(group)
        self._places |= {worker: (group, bundle) for bundle, worker in enumerate(workers)}

    def _remove_groups(self) -> None:
        for group in self._groups:
            remove_placement_group(group)

    def start(self, role: Role, index: int, make: Callable[..., object], *args: Any) -> Worker:
        group, bundle = self._places[role, index]
        resources = dict(self._resources[role])
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_concurrency": AT_ONCE,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }
        if python := self._python.get(role):
            options["runtime_env"] = {"py_executable": python}
        actor = ray.remote(ACTORS[role]).options(**options).remote(os.getcwd(), make, args)
        worker = _RayWorker(f"{role} {index}", actor)
        self._started.append(worker)
        return worker

    @staticmethod
    def put(value: Any) -> Reference:
        return _Stored(ray.put(value))

    def leave(self, worker: Worker, method: str, *args: Any) -> Future[tuple[Any, Reference]]:
        assert isinstance(worker, _RayWorker)
        return worker.leave(method, args)

    def rooms(self, role: Role, count: int) -> list[Room]:
        table, leaving = placement_group_table(), self._gcs.get_draining_nodes()
        return [_room(table.get(self._places[role, index][0].id.hex()), leaving) for index in range(count)]

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        return set(wait(futures, seconds, FIRST_COMPLETED).done)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        for worker in self._started:
            worker.kill()
        self._remove_groups()


def _room(group: Mapping[str, Any] | None, leaving: Collection[str]) -> Room:
    """Return the room that Ray has for a group, given the nodes that are to leave."""
    if group is None or group["state"] != "CREATED":
        return Room.NONE
    return Room.LEAVING if group["bundles_to_node_id"][0] in leaving else Room.FOUND


def node_address() -> str:
    """Return the address of this process's node in the cluster."""
    return str(ray.util.get_node_ip_address())


def _connect(cluster: str, bundles: Sequence[Mapping[str, float]]) -> None:
    """Join a cluster, or start Ray on this machine with as many logical CPUs as the workers ask for."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if cluster:
        try:
            ray.init(address=cluster, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"placement.cluster = '{cluster}' cannot be joined ({reason}); give the address and the token "
                "(RAY_AUTH_TOKEN) of a running Ray cluster, or leave the key out."
            ) from error
        return
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    needed = sum(bundle.get("CPU", 0) for bundle in bundles)
    cpus = max(os.cpu_count() or 1, math.ceil(needed))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray has no class of its own for this
            ray.shutdown()
            if attempt == ATTEMPTS:
                reason = " ".join(str(error).split()).rstrip(".")
                raise UserError(
                    f"Ray does not start on this machine ({reason}); look into /tmp/ray/session_latest/logs."
                ) from error


class _Actor:
    """The process of a worker. Ray hands over calls of an asynchronous actor in any order, so they have numbers."""

    def __init__(self, directory: str, make: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._calls = Calls(_make, directory, make, args)
        self._next = 0
        self._early: dict[int, tuple[Future[Any], str, tuple[Any, ...]]] = {}

    async def ask(self, number: int, method: str, args: tuple[Any, ...]) -> Any:
        answer: Future[Any] = Future()
        self._early[number] = answer, method, args
        while self._next in self._early:
            self._calls.ask(*self._early.pop(self._next))
            self._next += 1
        return await asyncio.wrap_future(answer)

    async def leave(self, number: int, method: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return a pair; the run's process asks for the first value, and owns the second, which stays in this node."""
        told, stays = await self.ask(number, method, args)
        return told, stays


class RolltreeEngine(_Actor):
    """An actor that `ps` and Ray's lists show under this name, as the others."""


class RolltreeRank(_Actor):
    pass


class RolltreeReward(_Actor):
    pass


ACTORS: dict[Role, type[_Actor]] = {"engine": RolltreeEngine, "rank": RolltreeRank, "reward": RolltreeReward}


def _make(directory: str, make: Callable[..., object], args: tuple[Any, ...]) -> object:
    if not Path(directory).is_dir():
        raise UserError(
            f"'{directory}', where the run was started, does not exist on node {ray.util.get_node_ip_address()}; "
            "start it in a directory that all nodes share."
        )
    os.chdir(directory)  # the configuration may name files relative to it
    return make(*args)


@dataclass(frozen=True)
class _Stored:
    reference: Any

    def get(self) -> Any:
        try:
            return ray.get(self.reference)
        except LOST as error:
            raise GoneError(f"what a process had stored is no more ({' '.join(str(error).split())[:200]})") from None


class _RayWorker(AskedWorker):
    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name)
        self._actor = actor

    def _send(self, number: int, method: str, args: tuple[Any, ...]) -> Future[Any]:
        sent: Future[Any] = self._actor.ask.remote(number, method, args).future()
        return sent

    def leave(self, method: str, args: tuple[Any, ...]) -> Future[tuple[Any, Reference]]:
        """See `Workers.leave`."""
        return self._begin(self._send_leaving, method, args)

    def _send_leaving(self, number: int, method: str, args: tuple[Any, ...]) -> Future[Any]:
        told, stays = self._actor.leave.options(num_returns=2).remote(number, method, args)
        sent: Future[Any] = Future()

        def store(done: Future[Any]) -> None:
            error = done.exception()
            settle(sent, None if error else (done.result(), _Stored(stays)), error=error)

        told.future().add_done_callback(store)
        return sent

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, LOST):
            return LostError(f"{self._name} has ended: {' '.join(str(error).split())[:300]}")
        if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            error.cause.add_note(f"In {self._name}: {error}")
            return error.cause
        return error

    def _end(self) -> None:
        ray.kill(self._actor, no_restart=True)
