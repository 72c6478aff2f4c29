"""A process that trains one model together with others (`trainer.ranks`), and what it exchanges with the run's process.

Each has a `Rank`: a `Learner` whose models are sharded over the process group that it has joined. Every rank gets the
whole batch and calls the same method, so credit, normalisers and schedules are computed by all, log-probs and losses by
each on its share. The first rank's answer returns what learning wrote on the trees, the metrics and the times.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..data.columns import COLUMNS, Array, Column, declare
from ..data.stored import StoredTree, whole
from ..data.tree import TokenTree
from ..errors import UserError
from ..learn.learned import RankState
from ..learn.learner import Learner
from ..learn.learning import LearningParts
from ..model.self_check import sampled_error, usual_tokens
from ..record.metrics import Stopwatch, Sums
from ..record.rollout_files import write_part
from ..rollout import SamplingParams
from ..rollout.digest import part_digests
from ..rollout.packed import Part
from ..train.checkpoint import Saved
from ..train.group import Group
from ..train.phases import Span
from .shipping import Shipment, Shipper, owned
from .workers import GoneError, LostError, Reference

FETCHES = 8
"""Trees that a rank fetches at a time."""

# -- what travels -----------------------------------------------------------------------------------------------------


class Digest(NamedTuple):
    """The values that are equal on all ranks after an update, as text, so that NaN equals itself."""

    updates: str
    loss: str
    grad_norm: str
    credit: str
    """Hash of the columns and rewards of the trees that learning has written."""


class Written(NamedTuple):
    """The columns and rewards of a tree that learning has added or changed; None for a column that stays with the first
    rank, as that of leaves alone comes to a `StoredTree`."""

    columns: dict[str, Array | None]
    rewards: dict[str, Array]


Left = list[dict[str, Array]]
"""Columns of each tree that stay with the first rank."""


class Reply(NamedTuple):
    """The first rank's result of an update.

    Attributes:
        changed: the policy has changed.
        written: for each tree.
        declared: the columns in ``written``.
        spans: times of the update's parts, from the beginning of the call.
        notes: sentences for the user.
    """

    changed: bool
    sums: Sums
    written: list[Written]
    declared: list[Column]
    spans: list[Span]
    utilization: dict[str, float]
    notes: list[str]


class Facts(NamedTuple):
    """The constants of a rank: shapes and dtypes of the parameters that engines get, `Trained.usual_tokens`, and its
    process."""

    parameters: dict[str, tuple[torch.Size, torch.dtype]]
    usual: Array
    pid: int


class Given(NamedTuple):
    trees: list[TokenTree]
    demonstrations: list[TokenTree]
    declared: list[Column]


def declarations(trees: Sequence[TokenTree]) -> list[Column]:
    return [COLUMNS[name] for name in dict.fromkeys(name for tree in trees for name in tree.names)]


def _copied(tree: TokenTree) -> TokenTree:
    """Return a tree whose columns, rewards and metadata can be written."""
    if isinstance(tree, StoredTree):
        return tree.copy()
    columns = {name: np.array(values) for name, values in tree.columns.items()}
    rewards = {name: np.array(values) for name, values in tree.rewards.items()}
    return replace(tree, columns=columns, rewards=rewards, meta=dict(tree.meta))


def _changed(now: Mapping[str, Array], before: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: values
        for name, values in now.items()
        if name not in before or before[name].dtype != values.dtype or before[name].tobytes() != values.tobytes()
    }


Changes = list[tuple[dict[str, Array], dict[str, Array]]]
"""The columns and the rewards of each tree that learning has added or changed."""


def _changes(trees: Sequence[TokenTree], received: Sequence[TokenTree]) -> Changes:
    """Return what was written on copies of trees that were ``received``; a rank has fetched only some of them."""
    changes = Changes()
    for tree, old in zip(trees, received, strict=True):
        if isinstance(tree, StoredTree):
            assert isinstance(old, StoredTree)
            columns = _changed(tree.here(), old.here())
        else:
            columns = _changed(tree.columns, whole(old).columns)
        changes.append((columns, _changed(tree.rewards, old.rewards)))
    return changes


def _hash(changes: Changes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for of_tree in changes:
        for values in of_tree:
            for name in sorted(values):
                digest.update(name.encode())
                digest.update(values[name].tobytes())
    return digest.hexdigest()


# -- in a rank's process --------------------------------------------------------------------------------------------


@contextmanager
def _peers_told() -> Iterator[None]:
    """Raise `LostError` for an error of a collective: another rank has ended, or keeps this one waiting."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower()):
            raise LostError(f"the other ranks do not answer ({' '.join(str(error).split())[:200]})") from None
        raise


class Rank:
    """One of the processes that train; all methods but `address`, `sampling` and `states` must be called on each.

    Args:
        make: makes the parts of the learner, sharded over the group.
        put: stores a value for all workers; see `Workers.put`.
        rank: number of this process.
        ranks: number of all.
        timeout_s: seconds that it waits for the others.
        threads: of PyTorch, on the CPU.
        host: address of this node for the ranks of other nodes; None if all are on one machine.
    """

    learner: Learner

    def __init__(
        self,
        make: Callable[[Group], LearningParts],
        put: Callable[[Any], Reference],
        rank: int,
        ranks: int,
        *,
        timeout_s: float,
        threads: int,
        host: str | None,
    ) -> None:
        self._make, self._rank, self._ranks, self._timeout_s = make, rank, ranks, timeout_s
        self._threads, self._host = threads, host
        self._shipper = Shipper(put)
        self._notes: list[str] = []
        self._gathered: list[TokenTree | None] = []  # views of this node's store, which keeps what has any
        self._held: RankState | None = None  # of the rank before
        self._spans: list[Span] = []
        self._watch = Stopwatch(told=lambda *span: self._spans.append(Span(*span)))

    def address(self) -> str | None:
        """Return an address at which the ranks can meet; None on one machine, where a file serves."""
        if self._host is None:
            return None
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{self._host}:{free.getsockname()[1]}"

    @_peers_told()
    def join(self, store: str) -> Facts:
        """Join the group at ``store`` and make the learner."""
        self.learner = Learner(self._make(self._joined(store)), self._watch, self._notes.append)
        tensors = self.learner.weights().tensors()
        parameters = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        return Facts(parameters, usual_tokens(self.learner.model.config), os.getpid())

    def _joined(self, store: str) -> Group:
        torch.set_num_threads(self._threads)
        if self._host is None and sys.platform == "linux":
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=timedelta(seconds=self._timeout_s),
        )
        return Group.joined()

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        """See `Learner.sampling`."""
        return self.learner.sampling(step, params)

    @_peers_told()
    def update(self, stored: Reference, step: int, sums: Sums) -> tuple[tuple[Digest, Reply | None], Left]:
        """Learn as `Learner.update` does; only the first rank replies."""
        received = self._received(stored)
        trees = [_copied(tree) for tree in received.trees]
        self._watch.restart()
        begin = time.perf_counter()
        changed = self.learner.update(trees, [_copied(tree) for tree in received.demonstrations], step, sums)
        times = self._watch.read(self.learner.spans())
        metrics = self.learner.metrics
        loss, norm = (repr(metrics.get(f"actor/{name}", math.nan)) for name in ("loss", "grad_norm"))
        changes = _changes(trees, received.trees)
        digest = Digest(str(self.learner.updates), loss, norm, _hash(changes))
        notes, self._notes[:] = self._notes[:], []
        spans, self._spans[:] = [Span(s.name, s.begin - begin, s.end - begin) for s in self._spans], []
        if self._rank:
            return (digest, None), []
        written, left = _written(changes, received.trees)
        utilization = self.learner.utilization(times)
        return (digest, Reply(changed, sums, written, declarations(trees), spans, utilization, notes)), left

    @_peers_told()
    def credit(self, stored: Reference, step: int) -> tuple[list[Written] | None, Left]:
        """Give trees their credit as `Learner.credit` does; only the first rank replies."""
        received = self._received(stored)
        trees = [_copied(tree) for tree in received.trees]
        self.learner.credit(trees, step)
        return (None, []) if self._rank else _written(_changes(trees, received.trees), received.trees)

    def gather(self, stored: Reference) -> list[int]:
        """Fetch this rank's part of the trees that will be trained next, and keep it, so that each is on another node
        too; return the places of those that are gone."""

        def fetch(tree: TokenTree) -> TokenTree | None:
            try:
                return whole(tree)
            except GoneError:
                return None

        trees = stored.get()
        places = range(self._rank, len(trees), self._ranks)
        with ThreadPoolExecutor(FETCHES) as threads:
            self._gathered = list(threads.map(fetch, [trees[at] for at in places]))
        return [at for at, tree in zip(places, self._gathered, strict=True) if tree is None]

    def record(self, folder: str, step: int, stored: Reference, texts: Reference) -> None:
        """Write this rank's part of the rollouts of ``step``."""
        write_part(Path(folder), step, self._received(stored).trees, texts.get(), self._rank, self._ranks)

    @staticmethod
    def _received(stored: Reference) -> Given:
        received: Given = stored.get()
        for column in received.declared:
            declare(column)
        return received

    @_peers_told()
    def ship(self, version: int, since: int | None) -> Shipment:
        """Store this rank's parts of the weights for the engines; see `Shipper.ship`."""
        return self._shipper.ship(self._parts(), version, since)

    @_peers_told()
    def digests(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
        """Return what this rank's parts contribute to the digests; see `part_digests`."""
        return part_digests(self._parts(), dtypes)

    def _parts(self) -> Iterator[Part]:
        return owned(self.learner.weights().tensors(), self._rank, self._ranks)

    @_peers_told()
    def sampled_error(self, stored: Reference) -> float:
        """See `Trained.sampled_error`."""
        return sampled_error(self.learner.model, self._received(stored).trees)

    @_peers_told()
    def save(self, directory: str) -> Saved:
        """See `Learner.save`.

        Raises:
            UserError: this node does not see the run's directory.
        """
        if not Path(directory).is_dir():
            raise UserError(
                f"'{directory}' does not exist on the node of rank {self._rank} ({socket.gethostname()}); let "
                "output_dir be on a file system that all nodes share."
            )
        return self.learner.save(Path(directory))

    @_peers_told()
    def load(self, directory: str, state: dict[str, Any]) -> int:
        """Restore what `save` wrote; return the number of updates."""
        self.learner.load(Path(directory), state)
        return self.learner.updates

    def state(self) -> tuple[None, RankState]:
        """Return None and `Learner.rank_state`, for `Workers.leave`."""
        return None, self.learner.rank_state()

    def hold(self, of_another: Reference) -> None:
        """Keep another rank's state in the memory of this node."""
        self._held = of_another.get()

    def take(self, kept: Reference) -> bool:
        """Restore this rank's state; return False if it is gone."""
        try:
            state = kept.get()
        except GoneError:
            return False
        self.learner.take(state)
        return True

    def states(self) -> dict[str, Any]:
        """See `Learner.states`."""
        return self.learner.states()

    def restore(self, states: Mapping[str, Any]) -> None:
        """See `Learner.restore`."""
        self.learner.restore(states)

    @_peers_told()
    def export(self, directory: str) -> None:
        """See `Learner.export`."""
        self.learner.export(Path(directory))


def _written(changes: Changes, received: Sequence[TokenTree]) -> tuple[list[Written], Left]:
    """Return what was written, and what of it stays here, of trees that were ``received`` stored."""
    written, left = list[Written](), Left()
    for (columns, rewards), tree in zip(changes, received, strict=True):
        stay = [name for name in columns if isinstance(tree, StoredTree) and COLUMNS[name].per != "leaf"]
        left.append({name: columns[name] for name in stay})
        written.append(Written(columns | dict.fromkeys(stay), rewards))
    return written, left
