"""Processes that train one model together (`trainer.ranks`), which are the run's `Learning` then.

Each has a `Rank`: a `Learner` whose models are sharded over the process group that it has joined. The run's process has
`Ranks` and no model. Every rank gets the whole batch and calls the same method, so credit, normalisers and schedules
are computed by all, log-probs and losses by each on its share. The first rank's answer returns what learning wrote on
the trees, the metrics and the times.

Every update is compared between the ranks: number of updates, loss, norm of the gradient, and a hash of what was
written on the trees. A difference ends the run.

A rank that ends, or that lets the others wait for longer than `trainer.timeout_s`, takes all with it: they are killed
and started anew, and `RanksLostError` tells the run to go back to its checkpoint. So does a rank that runs out of
memory, with half of `trainer.max_tokens` from then on. Answers of killed ranks are discarded with their futures.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..data.columns import COLUMNS, Array, Column, declare
from ..data.tree import TokenTree
from ..errors import RunError, UserError
from ..model.self_check import sampled_error, usual_tokens
from ..rollout import SamplingParams
from ..rollout.host import BUCKET_BYTES, pack_weights, unpack_weights
from ..train.checkpoint import Saved
from ..train.group import Group
from ..train.phases import Span
from .learner import Learner
from .metrics import Stopwatch, Sums
from .parts import LearningParts, RanksLostError
from .workers import LostError, Reference, Worker, Workers

LOOK_S = 0.5
"""Seconds between checks of the time while answers are outstanding."""
START_S = 900.0
"""Seconds that ranks may take to start: each loads the models."""
REASON_S = 2.0
"""Seconds to wait for the other ranks' errors after the first: the first may only follow from another."""

# -- what travels -----------------------------------------------------------------------------------------------------


class Digest(NamedTuple):
    """The values that are equal on all ranks after an update, as text, so that NaN equals itself."""

    updates: str
    loss: str
    grad_norm: str
    credit: str
    """Hash of all columns and rewards of the trees."""


class Written(NamedTuple):
    """The columns and rewards of a tree that learning has added or changed."""

    columns: dict[str, Array]
    rewards: dict[str, Array]


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
    """The constants of a rank: sizes of the parameters in bytes, `Trained.usual_tokens`, and its process."""

    parameters: dict[str, int]
    usual: Array
    pid: int


class _Given(NamedTuple):
    trees: list[TokenTree]
    demonstrations: list[TokenTree]
    declared: list[Column]


def _declarations(trees: Sequence[TokenTree]) -> list[Column]:
    return [COLUMNS[name] for name in dict.fromkeys(name for tree in trees for name in tree.columns)]


def _copied(tree: TokenTree) -> TokenTree:
    """Return a tree whose columns, rewards and metadata can be written."""
    columns = {name: np.array(values) for name, values in tree.columns.items()}
    rewards = {name: np.array(values) for name, values in tree.rewards.items()}
    return replace(tree, columns=columns, rewards=rewards, meta=dict(tree.meta))


def _changed(now: Mapping[str, Array], before: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: values
        for name, values in now.items()
        if name not in before or before[name].dtype != values.dtype or before[name].tobytes() != values.tobytes()
    }


def _hash(trees: Sequence[TokenTree]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tree in trees:
        for values in (tree.columns, tree.rewards):
            for name in sorted(values):
                found.update(name.encode())
                found.update(values[name].tobytes())
    return found.hexdigest()


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
    """One of the processes that train; every method but `address` and `sampling` must be called on all of them.

    Args:
        make: makes the parts of the learner, sharded over the group.
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
        rank: int,
        ranks: int,
        *,
        timeout_s: float,
        threads: int,
        host: str | None,
    ) -> None:
        self._make, self._rank, self._ranks, self._timeout_s = make, rank, ranks, timeout_s
        self._threads, self._host = threads, host
        self._notes: list[str] = []
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
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        return Facts(sizes, usual_tokens(self.learner.model.config), os.getpid())

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
    def update(self, stored: Reference, step: int, sums: Sums) -> tuple[Digest, Reply | None]:
        """Learn as `Learner.update` does; only the first rank replies."""
        given = self._received(stored)
        trees = [_copied(tree) for tree in given.trees]
        self._watch.restart()
        begin = time.perf_counter()
        changed = self.learner.update(trees, [_copied(tree) for tree in given.demonstrations], step, sums)
        times = self._watch.read(self.learner.spans())
        found = self.learner.metrics
        loss, norm = (repr(found.get(f"actor/{name}", math.nan)) for name in ("loss", "grad_norm"))
        digest = Digest(str(self.learner.updates), loss, norm, _hash(trees))
        notes, self._notes[:] = self._notes[:], []
        spans, self._spans[:] = [Span(s.name, s.begin - begin, s.end - begin) for s in self._spans], []
        if self._rank:
            return digest, None
        written = _written(trees, given.trees)
        utilization = self.learner.utilization(times)
        return digest, Reply(changed, sums, written, _declarations(trees), spans, utilization, notes)

    @_peers_told()
    def credit(self, stored: Reference, step: int) -> list[Written] | None:
        """Give trees their credit as `Learner.credit` does; only the first rank replies."""
        given = self._received(stored)
        trees = [_copied(tree) for tree in given.trees]
        self.learner.credit(trees, step)
        return None if self._rank else _written(trees, given.trees)

    @staticmethod
    def _received(stored: Reference) -> _Given:
        given: _Given = stored.get()
        for column in given.declared:
            declare(column)
        return given

    @_peers_told()
    def gather(self, names: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return whole parameters as `pack_weights` packs them; only the first rank replies."""
        tensors = self.learner.weights().tensors()
        whole = {}
        for name in names:
            tensor = tensors[name].detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._rank == 0:
                whole[name] = full
        return None if self._rank else list(pack_weights(whole))

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

    @_peers_told()
    def export(self, directory: str) -> None:
        """See `Learner.export`."""
        self.learner.export(Path(directory))


def _written(trees: Sequence[TokenTree], before: Sequence[TokenTree]) -> list[Written]:
    return [
        Written(_changed(tree.columns, old.columns), _changed(tree.rewards, old.rewards))
        for tree, old in zip(trees, before, strict=True)
    ]


# -- in the run's process ---------------------------------------------------------------------------------------------


class Ranks:
    """Trains with ranks in other processes; see `Learning` and the module's description. They start at once.

    Args:
        workers: starts the ranks.
        count: their number.
        make: makes a `Rank` in its process, from ``args``, its number, ``count`` and the size of micro-batches.
        max_tokens: packed tokens of one micro-batch.
        timeout_s: seconds that a rank may keep the others waiting.
        restarts: most losses of ranks without a new step.
        note: called with sentences for the user.

    Attributes:
        updates: see `Learning.updates`.
        pids: the processes of the ranks, once they have joined.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        workers: Workers,
        count: int,
        make: Callable[..., Rank],
        *args: Any,
        max_tokens: int,
        timeout_s: float,
        restarts: int,
        note: Callable[[str], object],
    ) -> None:
        self.workers, self.count, self._make, self._args = workers, count, make, args
        self.max_tokens, self._timeout_s, self._restarts, self._note = max_tokens, timeout_s, restarts, note
        self.updates, self.pids = 0, list[int]()
        self.policies: dict[str, Learner] = {}
        self._known: Facts | None = None  # None: the ranks have not joined yet
        self._lost = 0  # times since the newest step
        self._newest = 0  # newest step that was learned
        self._out_of_memory = 0  # times since the last update
        self._spans: list[Span] = []
        self._utilization: dict[str, float] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="rolltree-ranks-")
        self._groups = 0
        self._ranks: list[Worker] = []
        self._start()

    def ready(self) -> None:
        """Wait until the ranks have loaded their models.

        Raises:
            UserError: a part of the run cannot be made.
            RunError: too many ranks were lost.
        """
        while self._known is None:
            try:
                self._join()
            except RanksLostError as error:
                self._note(f"{error}.")

    # -- learning -----------------------------------------------------------------------------------------------------

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        self._join()
        (found,) = self._ask(self._ranks[:1], "sampling", step, params, seconds=self._timeout_s)
        assert isinstance(found, SamplingParams)
        return found

    def update(self, trees: list[TokenTree], given: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn as `Learner.update` does.

        Raises:
            UserError: as for `Learner.update`.
            RunError: the ranks learned differently.
            RanksLostError: see `Learning`.
            torch.OutOfMemoryError: not even one sequence fits into memory.
        """
        begin = time.perf_counter()
        answers = self._learn("update", trees, given, step, sums)
        digests, reply = [digest for digest, _ in answers], answers[0][1]
        assert isinstance(reply, Reply)
        for note in reply.notes:
            self._note(note)
        self._compare(digests, step)
        for column in reply.declared:
            declare(column)
        _write(trees, reply.written)
        sums.become(reply.sums)
        if self._out_of_memory:
            sums.count("actor/out_of_memory", self._out_of_memory)
        self._spans += [Span(s.name, begin + s.begin, begin + s.end) for s in reply.spans]
        self._utilization = reply.utilization
        self.updates, self._out_of_memory = int(digests[0].updates), 0
        if step > self._newest:
            self._newest, self._lost = step, 0
        return reply.changed

    def credit(self, trees: Sequence[TokenTree], step: int) -> None:
        """Give trees their credit as `Learner.credit` does; raises as `update`."""
        _write(trees, self._learn("credit", trees, [], step)[0])

    def _learn(self, method: str, trees: Sequence[TokenTree], given: Sequence[TokenTree], *args: Any) -> list[Any]:
        stored = self._put(trees, given)
        try:
            return self._all(method, stored, *args)
        except torch.OutOfMemoryError:
            if self.max_tokens // 2 < max(int(tree.path_length.max()) for tree in [*trees, *given]):
                raise
            self.max_tokens //= 2
            self._out_of_memory += 1
            self._restart()
            raise RanksLostError(
                f"A rank ran out of memory; micro-batches have {self.max_tokens} tokens from now on"
            ) from None

    def _put(self, trees: Sequence[TokenTree], given: Sequence[TokenTree] = ()) -> Reference:
        return self.workers.put(_Given(list(trees), list(given), _declarations([*trees, *given])))

    @staticmethod
    def _compare(digests: Sequence[Digest], step: int) -> None:
        for rank, digest in enumerate(digests):
            for what, mine, other in zip(Digest._fields, digests[0], digest, strict=True):
                if mine != other:
                    raise RunError(
                        f"In step {step} the ranks learned differently: {what} is {mine} on rank 0 and {other} on rank "
                        f"{rank}; let your own functions (credit, shaping, selections, schedules) give the same result "
                        "in every process, or report this as a defect of rolltree."
                    )

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def utilization(self, times: dict[str, float]) -> dict[str, float]:
        found, self._utilization = self._utilization, {}
        return found

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Gathered:
        self._join()
        assert self._known is not None
        return Gathered(self._known.parameters, lambda names: self._all("gather", names)[0])

    def usual_tokens(self) -> Array:
        self._join()
        assert self._known is not None
        return self._known.usual

    def sampled_error(self, trees: Sequence[TokenTree]) -> float:
        found: float = self._all("sampled_error", self._put(trees))[0]
        return found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> Saved:
        saved: Saved = self._all("save", str(directory.absolute()))[0]
        return saved

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        self.updates = self._all("load", str(directory.absolute()), state)[0]

    def export(self, directory: Path) -> None:
        self._all("export", str(directory.absolute()))

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _all(self, method: str, *args: Any) -> list[Any]:
        self._join()
        return self._ask(self._ranks, method, *args)

    def _start(self) -> None:
        self._known = None
        self._ranks = [
            self.workers.start("rank", index, self._make, *self._args, index, self.count, self.max_tokens)
            for index in range(self.count)
        ]

    def _restart(self) -> None:
        """Kill all ranks and start others in their places."""
        for rank in self._ranks:
            rank.kill()
        self._start()

    def _join(self) -> None:
        """Wait until newly started ranks have formed a group."""
        if self._known is not None:
            return
        (address,) = self._ask(self._ranks[:1], "address", seconds=START_S)
        self._groups += 1
        store = address or f"file://{self._directory.name}/{self._groups}"
        facts = self._ask(self._ranks, "join", store, seconds=START_S)
        self._known, self.pids = facts[0], [known.pid for known in facts]

    def _ask(self, ranks: Sequence[Worker], method: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Return the answers of ``ranks``.

        Args:
            seconds: most that any answer may take; None: each may take `trainer.timeout_s` longer than the first.

        Raises:
            RanksLostError: see `Learning`.
            Exception: the method raised it.
        """
        futures = [rank.ask(method, *args) for rank in ranks]
        latest = math.inf if seconds is None else self.workers.clock() + seconds
        while waiting := [future for future in futures if not future.done()]:
            answered = [future for future in futures if future.done()]
            if any(future.exception() is not None for future in answered):
                break
            now = self.workers.clock()
            if answered:
                latest = min(latest, now + self._timeout_s)
            if now > latest:
                self._give_up(f"rank {futures.index(waiting[0])} gave no answer to '{method}' (trainer.timeout_s)")
            self.workers.wait(waiting, min(LOOK_S, max(0.0, latest - now) + 0.001))
        until = self.workers.clock() + REASON_S
        while any(future.exception() is not None for future in futures if future.done()):
            waiting = [future for future in futures if not future.done()]
            if not waiting or self.workers.clock() > until:
                raise self._reason([future.exception() for future in futures if future.done()])
            self.workers.wait(waiting, LOOK_S)
        return [future.result() for future in futures]

    def _reason(self, errors: Sequence[BaseException | None]) -> BaseException:
        """Return the error from which the others follow; if that is a loss, start the ranks anew and raise it."""
        told = [error for error in errors if error is not None]
        for kind in (torch.OutOfMemoryError, Exception):
            for error in told:
                if isinstance(error, kind) and not isinstance(error, LostError):
                    return error
        ended = [str(error) for error in told if "do not answer" not in str(error)] or [str(told[0])]
        self._give_up(ended[0].rstrip("."))

    def _give_up(self, why: str) -> NoReturn:
        """Start all ranks anew.

        Raises:
            RanksLostError: always, unless a `RunError` says that it has happened too often.
        """
        self._lost += 1
        if self._lost > self._restarts:
            raise RunError(
                f"Ranks were lost {self._lost} times without a new step (placement.restarts = {self._restarts}), the "
                f"last time because {why}; look into the logs of Ray (/tmp/ray/session_latest/logs), then use --resume."
            )
        self._restart()
        raise RanksLostError(f"The ranks are started anew because {why}")


def _write(trees: Sequence[TokenTree], written: Sequence[Written]) -> None:
    for tree, of_tree in zip(trees, written, strict=True):
        tree.columns |= {name: np.array(values) for name, values in of_tree.columns.items()}
        tree.rewards |= {name: np.array(values) for name, values in of_tree.rewards.items()}


class Gathered(Mapping[str, Tensor]):
    """The policy's whole parameters by name, of which one bucket is in memory; read them in order.

    Args:
        sizes: bytes of each parameter.
        gather: returns the parameters of these names as `pack_weights` packs them.
    """

    def __init__(self, sizes: Mapping[str, int], gather: Callable[[Sequence[str]], Sequence[dict[str, Any]]]) -> None:
        self._gather = gather
        self._bucket_of: dict[str, list[str]] = {}
        self._held: dict[str, Tensor] = {}
        bucket: list[str] = []
        total = 0
        for name, size in sizes.items():
            if bucket and total + size > BUCKET_BYTES:
                bucket, total = [], 0
            bucket.append(name)
            total += size
            self._bucket_of[name] = bucket

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters; see `WeightSource`."""
        return self

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            self._held = {}  # before the next bucket comes
            found = self._gather(self._bucket_of[name])
            self._held = {key: tensor for packed in found for key, tensor in unpack_weights(packed)}
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bucket_of)

    def __len__(self) -> int:
        return len(self._bucket_of)
