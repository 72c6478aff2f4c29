"""The run's side of the processes that train one model together (`trainer.ranks`): its `Learning`, without a model.

Each process has a `Rank` (`rank.py`). Every update is compared between the ranks: number of updates, loss, norm of the
gradient, and a hash of what was written on the trees. A difference ends the run.

A rank that ends, or that lets the others wait for longer than `trainer.timeout_s`, takes all with it: they are killed
and started anew, and `RanksLostError` tells the run to go back to its checkpoint. So does a rank that runs out of
memory, with half of `trainer.max_tokens` from then on. Answers of killed ranks are discarded with their futures.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data.columns import Array, declare
from ..data.stored import StoredTree
from ..data.tree import TokenTree
from ..errors import RunError
from ..learn.learning import RanksLostError
from ..record.metrics import Sums
from ..record.rollout_files import step_folder
from ..rollout import SamplingParams
from ..rollout.digest import whole_digest
from ..tasks.images import Image
from ..train.checkpoint import Saved
from ..train.phases import Span
from .rank import Digest, Facts, Given, Rank, Reply, Written, declarations
from .shipping import Elsewhere, Shipment
from .workers import LostError, Reference, Worker, Workers

T = TypeVar("T")
LOOK_S = 0.5
"""Seconds between checks of the time while answers are outstanding."""
REASON_S = 2.0
"""Seconds to wait for the other ranks' errors after the first: the first may only follow from another."""


class Kept(NamedTuple):
    """The state after an update, in memory."""

    ranks: list[Reference]
    functions: dict[str, Any]
    updates: int


class Ranks:
    """Trains with ranks in other processes; see `Learning` and the module's description. They start at once.

    Args:
        workers: starts the ranks.
        count: their number.
        make: makes a `Rank` in its process, from ``args``, `Workers.put`, its number, ``count`` and the size of
            micro-batches.
        max_tokens: packed tokens of one micro-batch.
        timeout_s: seconds that a rank may keep the others waiting.
        start_s: seconds that the ranks may take to start: each loads the models.
        restarts: most losses of ranks without a new step.
        note: called with sentences for the user.
        mirrors: ranks that are started anew take the state after the last update from memory, if it is there.

    Attributes:
        updates: see `Learning.updates`.
        pids: the processes of the ranks, once they have joined.
    """

    device = torch.device("cpu")
    ahead = None  # all ranks score their shares of a batch together

    def __init__(
        self,
        workers: Workers,
        count: int,
        make: Callable[..., Rank],
        *args: Any,
        max_tokens: int,
        timeout_s: float,
        start_s: float,
        restarts: int,
        note: Callable[[str], object],
        mirrors: bool = False,
    ) -> None:
        self.workers, self.count, self._make, self._args = workers, count, make, args
        self.max_tokens, self._restarts, self._note = max_tokens, restarts, note
        self._timeout_s, self._start_s = timeout_s, start_s
        self.updates, self.pids = 0, list[int]()
        self.policies: dict[str, Any] = {}  # several ranks train one policy
        self._facts: Facts | None = None  # None: the ranks have not joined yet
        self._lost = 0  # times since the newest step
        self._newest = 0  # newest step that was learned
        self._out_of_memory = 0  # times since the last update
        self._spans: list[Span] = []
        self._utilization: dict[str, float] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="rolltree-ranks-")
        self._mirrors = mirrors
        self._kept: Kept | None = None  # after the newest update
        self._groups = 0
        self._asking = threading.RLock()  # all ranks are asked in one order
        self._ranks: list[Worker] = []
        self._start()

    def ready(self) -> None:
        """Wait until the ranks have loaded their models.

        Raises:
            UserError: a part of the run cannot be made.
            RunError: too many ranks were lost.
        """
        while self._facts is None:
            try:
                self._join()
            except RanksLostError as error:
                self._note(f"{error}.")

    # -- learning -----------------------------------------------------------------------------------------------------

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        (current,) = self._repeated(
            lambda: self._ask(self._ranks[:1], "sampling", step, params, seconds=self._timeout_s)
        )
        assert isinstance(current, SamplingParams)
        return current

    def update(self, trees: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn as `Learner.update` does.

        Raises:
            UserError: as for `Learner.update`.
            RunError: the ranks learned differently.
            RanksLostError: see `Learning`.
            torch.OutOfMemoryError: not even one sequence fits into memory.
        """
        begin = time.perf_counter()
        answers, left = self._learn("update", trees, demonstrations, step, sums)
        digests, reply = [digest for digest, _ in answers], answers[0][1]
        assert isinstance(reply, Reply)
        for note in reply.notes:
            self._note(note)
        self._compare(digests, step)
        for column in reply.declared:
            declare(column)
        _write(trees, reply.written, left)
        sums.become(reply.sums)
        if self._out_of_memory:
            sums.count("actor/out_of_memory", self._out_of_memory)
        self._spans += [Span(s.name, begin + s.begin, begin + s.end) for s in reply.spans]
        self._utilization = reply.utilization
        self._out_of_memory = 0
        if step > self._newest:
            self._newest, self._lost = step, 0
        return reply.changed

    def credit(self, trees: Sequence[TokenTree], step: int) -> None:
        """Give trees their credit as `Learner.credit` does; raises as `update`."""
        answers, left = self._learn("credit", trees, [], step)
        _write(trees, answers[0], left)

    def gather(self, trees: Sequence[TokenTree]) -> list[int]:
        """Let the ranks fetch trees as `Learning.gather` says; raises as `_repeated`."""
        if not any(isinstance(tree, StoredTree) for tree in trees):
            return []
        gone = self._all("gather", self.workers.put(list(trees)))
        return sorted({at for of_rank in gone for at in of_rank})

    def record(
        self,
        directory: Path,
        step: int,
        trees: Sequence[TokenTree],
        texts: Sequence[Sequence[str]],
        images: Sequence[Sequence[Image]],
    ) -> None:
        """Let each rank write a part of the rollouts of ``step``, which have no pictures; raises as `_repeated`."""
        with step_folder(directory, step) as folder:
            stored = self._put(trees), self.workers.put(list(texts))
            self._all("record", str(folder.absolute()), step, *stored)

    def _learn(
        self, method: str, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree], *args: Any
    ) -> tuple[list[Any], Reference]:
        """Return the ranks' answers, and what the first one has written on the tokens of stored trees."""
        stored = self._put(trees, demonstrations)

        def learn() -> tuple[list[Any], Reference]:
            calls = [self.workers.leave(rank, method, stored, *args) for rank in self._ranks]
            try:
                pairs = self._answers(method, calls)
            except torch.OutOfMemoryError:
                if self.max_tokens // 2 < max(int(tree.path_length.max()) for tree in [*trees, *demonstrations]):
                    raise
                self.max_tokens //= 2
                self._out_of_memory += 1
                self._restart()
                raise RanksLostError(
                    f"A rank ran out of memory; micro-batches have {self.max_tokens} tokens from now on"
                ) from None
            answers = [told for told, _ in pairs]
            if method == "update":
                self.updates = int(answers[0][0].updates)
            if self._mirrors:
                self._keep()
            return answers, pairs[0][1]

        return self._repeated(learn)

    def _put(self, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree] = ()) -> Reference:
        return self.workers.put(Given(list(trees), list(demonstrations), declarations([*trees, *demonstrations])))

    @staticmethod
    def _compare(digests: Sequence[Digest], step: int) -> None:
        for rank, digest in enumerate(digests):
            for what, first, other in zip(Digest._fields, digests[0], digest, strict=True):
                if first != other:
                    raise RunError(
                        f"In step {step} the ranks learned differently: {what} is {first} on rank 0 and {other} on "
                        f"rank {rank}; let your own functions (credit, shaping, selections, schedules) give the same "
                        "result in every process, or report this as a defect of rolltree."
                    )

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def utilization(self, times: dict[str, float]) -> dict[str, float]:
        utilization, self._utilization = self._utilization, {}
        return utilization

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> RankWeights:
        self._repeated(lambda: None)
        assert self._facts is not None
        return RankWeights(self._facts.parameters, self._all, self._ship_again)

    def _ship_again(self, version: int) -> Shipment | None:
        """Store the weights as `Elsewhere.ship_again` says; raises as `_repeated`."""
        if not self._asking.acquire(blocking=False):
            return None
        try:
            return Shipment.joined(self._all("ship", version, None)) if self.updates == version else None
        finally:
            self._asking.release()

    def usual_tokens(self) -> Array:
        self._repeated(lambda: None)
        assert self._facts is not None
        return self._facts.usual

    def sampled_error(self, trees: Sequence[TokenTree]) -> float:
        error: float = self._all("sampled_error", self._put(trees))[0]
        return error

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> Saved:
        saved: Saved = self._all("save", str(directory.absolute()))[0]
        return saved

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        with self._asking:
            self._kept = None  # of another update
            self.updates = self._all("load", str(directory.absolute()), state)[0]

    def states(self) -> dict[str, Any]:
        """Return the states of the first rank's functions: all ranks give credit to all trees, so theirs are equal."""
        states: dict[str, Any] = self._repeated(self._ask_states)
        return states

    def _ask_states(self) -> dict[str, Any]:
        states: dict[str, Any] = self._ask(self._ranks[:1], "states", seconds=self._timeout_s)[0]
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        self._all("restore", dict(states))

    def export(self, directory: Path) -> None:
        self._all("export", str(directory.absolute()))

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._repeated(lambda: self._ask(self._ranks, method, *args))

    def _repeated(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which asks the ranks; where they are lost, let others go on with their state
        and repeat it. Work that changes the state ends with `_keep`.

        Raises:
            RanksLostError: the state is not in memory.
        """
        with self._asking:
            while True:
                try:
                    self._join()
                    return work()
                except RanksLostError as error:
                    self._go_on(error)

    def _keep(self) -> None:
        """Keep the state of every rank in the memory of its node and of the next rank's."""
        left = self._answers("state", [self.workers.leave(rank, "state") for rank in self._ranks])
        kept = [state for _, state in left]
        self._hold(kept)
        self._kept = Kept(kept, self._ask_states(), self.updates)

    def _hold(self, kept: Sequence[Reference]) -> None:
        self._answers("hold", [rank.ask("hold", kept[index - 1]) for index, rank in enumerate(self._ranks)])

    def _go_on(self, error: RanksLostError) -> None:
        """Give ranks that were started anew the state that was kept.

        Raises:
            RanksLostError: it is gone, or none was kept.
        """
        while (kept := self._kept) is not None:
            self._note(f"{error}; they go on with the state in memory, of update {kept.updates}.")
            try:
                self._join()
                taken = self._answers(
                    "take", [rank.ask("take", one) for rank, one in zip(self._ranks, kept.ranks, strict=True)]
                )
                if not all(taken):
                    self._kept = None
                    error = RanksLostError("The state of the ranks in memory is gone")
                    continue
                self._ask(self._ranks, "restore", kept.functions)
                self._hold(kept.ranks)
                self.updates = kept.updates
                return
            except RanksLostError as another:
                error = another
        raise error

    def _start(self) -> None:
        self._facts = None
        self._ranks = [
            self.workers.start(
                "rank", index, self._make, *self._args, self.workers.put, index, self.count, self.max_tokens
            )
            for index in range(self.count)
        ]

    def _restart(self) -> None:
        """Kill all ranks and start others in their places, which have the first weights."""
        for rank in self._ranks:
            rank.kill()
        self.updates = 0
        self._start()

    def _join(self) -> None:
        """Wait until newly started ranks have formed a group."""
        if self._facts is not None:
            return
        (address,) = self._ask(self._ranks[:1], "address", seconds=self._start_s)
        self._groups += 1
        store = address or f"file://{self._directory.name}/{self._groups}"
        facts = self._ask(self._ranks, "join", store, seconds=self._start_s)
        self._facts, self.pids = facts[0], [fact.pid for fact in facts]

    def _ask(self, ranks: Sequence[Worker], method: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Return the answers of ``ranks``.

        Args:
            seconds: most that any answer may take; None: each may take `trainer.timeout_s` longer than the first.

        Raises:
            RanksLostError: see `Learning`.
            Exception: the method raised it.
        """
        return self._answers(method, [rank.ask(method, *args) for rank in ranks], seconds)

    def _answers(self, method: str, futures: Sequence[Future[Any]], seconds: float | None = None) -> list[Any]:
        """Return the answers to calls of ``method``; see `_ask`."""
        latest = math.inf if seconds is None else self.workers.clock() + seconds
        while waiting := [future for future in futures if not future.done()]:
            answered = [future for future in futures if future.done()]
            if any(future.exception() is not None for future in answered):
                break
            now = self.workers.clock()
            if answered:
                latest = min(latest, now + self._timeout_s)
            if now > latest:
                key = "placement.start_s" if method in ("address", "join") else "trainer.timeout_s"
                self._give_up(f"rank {futures.index(waiting[0])} gave no answer to '{method}' ({key})")
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


def _write(trees: Sequence[TokenTree], written: Sequence[Written], left: Reference) -> None:
    """Enter what the ranks have written.

    Args:
        left: the columns of each tree that are None in ``written``.
    """
    for at, (tree, of_tree) in enumerate(zip(trees, written, strict=True)):
        if isinstance(tree, StoredTree):
            tree.write(of_tree.columns, of_tree.rewards, left, at)
        else:
            tree.columns |= {name: np.array(values) for name, values in of_tree.columns.items()}
            tree.rewards |= {name: np.array(values) for name, values in of_tree.rewards.items()}


class RankWeights(Elsewhere):
    """The policy's parameters, of which each rank has its parts.

    Args:
        parameters: shape and dtype of each parameter.
        ask: calls a method of all ranks and returns their answers.
        again: see `ship_again`.
    """

    def __init__(
        self,
        parameters: Mapping[str, tuple[torch.Size, torch.dtype]],
        ask: Callable[..., Sequence[Any]],
        again: Callable[[int], Shipment | None],
    ) -> None:
        self._parameters, self._ask, self._again = parameters, ask, again

    def tensors(self) -> Mapping[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in self._parameters.items()
        }

    def ship(self, version: int, since: int | None) -> Shipment:
        return Shipment.joined(self._ask("ship", version, since))

    def ship_again(self, version: int) -> Shipment | None:
        return self._again(version)

    def digests(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
        shares = self._ask("digests", dtypes)
        return {name: whole_digest(share.get(name, 0) for share in shares) for name in dtypes}
