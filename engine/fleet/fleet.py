"""Rollout engines in other processes, which together are the run's `Sampler`.

Each engine is a worker whose object is a `Host`. Its states:

    starting -> loading -> serving -> lost: a new worker begins again at starting
        +-----------------^      no weights have been loaded yet, so it samples with those of the model's directory

Only a serving engine gets jobs. An engine comes to `serving` only with the newest weights, and every job names the
version that it needs, for which its host waits; so a job never sees older weights. A job goes to the engine with the
fewest responses in flight, or where the keys of its prompt are; the jobs of one admission begin together.

A worker that ends, or that takes no step for ``hang_s`` while it has work, is killed and replaced. Its jobs begin anew
elsewhere, with their seeds, so the same tokens are sampled if the weights are the same. A result is the value of one
future; those of a killed worker are discarded with it, so no job has two results.

Where their number follows a cluster, an engine that joins starts as a replacement does, and one whose node leaves ends
as a killed one does (`rolltree.engine.fleet.rooms`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..data.segment import Text
from ..data.stored import LossVersions, StoredTexts, StoredTree, TreeOf
from ..data.tree import TokenTree
from ..errors import RunError
from ..learn.learning import RanksLostError
from ..rewards import RewardItem, RewardResult
from ..rollout.digest import Held
from ..rollout.sampler import Array, Flight, Job, Kept, WeightSource
from . import engines
from .engines import Engine, LeastLoaded, News
from .host import Facts, Host, Result
from .rooms import Rooms
from .shipping import Elsewhere, Shipper, ship
from .workers import GoneError, LostError, Reference, Room, Workers

LOOK_S = 0.05
"""Seconds between checks of the engines while a caller waits for one answer."""


class Fleet:
    """Samples with engines in other processes; see `Sampler` and the module's description.

    Args:
        workers: starts the engines.
        engines: their number; the largest one with ``least``.
        make: makes the `Host` of an engine, in its process.
        args: arguments of ``make``.
        hang_s: seconds without a step, or without an answer, after which an engine is replaced.
        start_s: seconds that an engine may take to start, and to load weights: vLLM compiles its model.
        restarts: most engines that may be lost between two loads of weights; with ``least``, most losses of one.
        sends_changes: send engines that have the last weights what has changed in them.
        judge: answers the questions of rollout programs; None if these have a verifier in their engine's process.
        least: smallest number of engines, where it follows the cluster; None where it is fixed.
        stores: trees and texts of `submit` stay where they were sampled, for processes that judge and train: they are
            `StoredTree` and `StoredTexts`.
        tells_texts: this process has the texts at once, as its own verifiers read them.
        note: called with sentences for the user.
    """

    def __init__(
        self,
        workers: Workers,
        engines: int,
        make: Callable[..., Host],
        *args: Any,
        hang_s: float,
        start_s: float,
        restarts: int,
        sends_changes: bool = False,
        judge: Callable[[Sequence[RewardItem]], Future[list[RewardResult]]] | None = None,
        least: int | None = None,
        stores: bool = False,
        tells_texts: bool = False,
        note: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.workers, self._make, self._args = workers, make, args
        self._hang_s, self._start_s, self._restarts, self._judge = hang_s, start_s, restarts, judge
        self._sends_changes, self._stores, self._tells_texts = sends_changes, stores, tells_texts
        self._version = self._newest = 0  # of the weights; the run may go back from the newest
        self._shipper = Shipper(workers.put)
        self._source: WeightSource | None = None  # of the newest weights
        self._weights: tuple[list[Reference], bool] | None = None  # their whole buckets, and `keep_keys`
        self._loads: dict[Future[int], list[Reference]] = {}  # of these weights, by the buckets that were stored then
        self._gone: str | None = None  # why the buckets cannot be fetched any more
        self._without: set[Engine] = set()  # could not fetch them
        self._times_gone = 0  # since the newest version
        self._numbers = 0
        self._lost: Counter[int] = Counter()  # losses of each engine since the last weights
        self._before: Counter[str] = Counter()  # tally of workers that are no more
        self._pending: list[Flight] = []  # without an engine
        self._held_out: set[Flight] = set()  # unfinished, of `generate`
        self._landed: list[Flight] = []  # done, not returned yet
        self._facts: Facts | None = None
        self._news, self._least = News(), LeastLoaded()
        self._looked = workers.clock()  # when it last looked after all engines
        self._rooms, self._note = None if least is None else Rooms(workers, least, engines, note), note
        self._at = {index: self._start(index) for index in range(engines if least is None else 0)}
        self._follow()

    @property
    def _engines(self) -> list[Engine]:
        return list(self._at.values())

    # -- facts ------------------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int | None:
        return self._known_facts().longest

    @property
    def end_token_ids(self) -> Collection[int]:
        return self._known_facts().end_token_ids

    def _known_facts(self) -> Facts:
        while self._facts is None:
            self._round(LOOK_S)
        return self._facts

    @property
    def tally(self) -> Counter[str]:
        """Sums over the engines as of their newest results; see `Sampler.tally`."""
        return sum((engine.tally for engine in self._engines), self._before)

    # -- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> list[Flight]:
        flights = [Flight(replace(job, version=self._version)) for job in jobs]
        self._pending += flights
        self._dispatch()
        return flights

    def step(self, seconds: float) -> list[Flight]:
        self._round(0.0 if self._landed else seconds)
        done, self._landed = self._landed, []
        return done

    def generate(self, jobs: Sequence[Job]) -> list[TokenTree]:
        flights = [Flight(replace(job, version=self._version)) for job in jobs]
        self._held_out |= set(flights)
        self._pending += flights
        try:
            self._dispatch()
            for flight in flights:
                while not flight.done:
                    self._round(LOOK_S)
                if flight.error is not None:
                    raise flight.error
        finally:
            self.drop([flight for flight in flights if not flight.done])
            self._landed = [flight for flight in self._landed if flight not in self._held_out]
            self._held_out.clear()
        return [flight.tree for flight in flights if flight.tree is not None]

    def kept(self, flights: Sequence[Flight]) -> list[Kept]:
        chosen, questions = set(flights), []
        for engine in self._engines:
            if of_engine := {number: flight for number, (flight, _) in engine.jobs.items() if flight in chosen}:
                questions.append((list(of_engine.values()), engine.worker.ask("kept", list(of_engine))))
        states: dict[Flight, Kept] = {}
        for members, future in questions:
            while not future.done():
                self._round(LOOK_S, future)
            if not isinstance(future.exception(), LostError):  # lost ones begin anew, here and when resumed
                states |= dict(zip(members, future.result(), strict=True))
        unbegun = Kept(None, None)
        return [
            Kept(dict(flight.job.kept), None) if state == unbegun and flight.job.kept is not None else state
            for flight in flights
            for state in [states.get(flight, unbegun)]
        ]

    def drop(self, flights: Sequence[Flight]) -> None:
        if not flights:
            return
        dropped = set(flights)
        self._pending = [flight for flight in self._pending if flight not in dropped]
        for engine in self._engines:
            if numbers := [number for number, (flight, _) in engine.jobs.items() if flight in dropped]:
                for number in numbers:
                    engine.remove(number)
                self._least.changed(engine)
                engine.ask(self.workers.clock(), "drop", numbers)

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Array]]:
        while True:
            if serving := [engine for engine in self._engines if engine.serving]:
                future = min(serving, key=lambda engine: engine.load).worker.ask("score", prompts, continuations)
                while not future.done():
                    self._round(LOOK_S, future)
                if not isinstance(future.exception(), LostError):
                    logprobs: list[list[Array]] = future.result()
                    return logprobs
            self._round(LOOK_S)

    def probe(self, prompts: Sequence[Sequence[int]], *, n: int, tokens: int, seed: int) -> list[TokenTree]:
        """Return the responses of every engine that serves; see `Sampler.probe`."""
        answers: list[list[TokenTree]] = self._ask_all("probe", prompts, n, tokens, seed)
        return [tree for trees in answers for tree in trees]

    def digests(self) -> Mapping[str, Held]:
        """Return the digests that all engines agree on; see `Sampler.digests`.

        Raises:
            RunError: two engines hold different weights.
        """
        first, *rest = self._ask_all("digests")
        for held in rest:
            if wrong := [name for name in first if held.get(name) != first[name]]:
                raise RunError(
                    f"Two rollout engines hold different weights of version {self._version}: '{wrong[0]}' and "
                    f"{len(wrong) - 1} more of {len(first)} tensors; this is a defect of rolltree, please report it."
                )
        return cast("Mapping[str, Held]", first)

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Return the answers of the engines that serve, once these have the newest weights.

        Engines that are lost meanwhile give none; there is at least one answer.
        """
        while True:
            serving = [engine for engine in self._engines if engine.serving]
            if serving and not any(engine.commands for engine in serving):
                futures = [engine.worker.ask(method, *args) for engine in serving]
                while not all(future.done() for future in futures):
                    self._round(LOOK_S, *futures)
                if answers := [f.result() for f in futures if not isinstance(f.exception(), LostError)]:
                    return answers
            self._round(LOOK_S)

    # -- weights and keys -------------------------------------------------------------------------------------------

    def load(self, weights: WeightSource | None, version: int, *, keep_keys: bool) -> None:
        """Let every engine fetch the weights while it samples; jobs submitted from now on wait for them there.

        Weights older than the present ones, of a run that goes back to a checkpoint, are waited for here.
        """
        if weights is None:
            raise ValueError("Engines in other processes need weights; none were given.")
        goes_back = version < self._version  # to a checkpoint, in place
        compares = self._sends_changes and self._weights is not None and self._gone is None and not goes_back
        since = self._version if compares else None
        shipment = ship(weights, self._shipper, version, since)
        self._before["weight_bytes"] += shipment.nbytes
        self._before["sent_weight_bytes"] += shipment.sent_nbytes
        if version > self._newest:
            self._newest, self._times_gone = version, 0
        self._version, self._lost, self._source = version, Counter(), weights
        self._weights, self._loads = (shipment.whole, keep_keys and not goes_back), {}
        self._gone, self._without = None, set()
        for engine in self._engines:
            if engine.serving and shipment.changes is not None:
                future = engine.call("load", shipment.changes, version, keep_keys, since)
                engine.commands[future] = self.workers.clock()
                self._loads[future] = shipment.whole
            elif engine.facts is None:
                self._ask_load(engine)
        while goes_back and any(engine.commands for engine in self._engines):  # newer weights would serve as well
            self._round(LOOK_S)

    def _ask_load(self, engine: Engine) -> None:
        """Let an engine fetch the newest weights, whole."""
        assert self._weights is not None
        buckets, keep_keys = self._weights
        future = engine.call("load", buckets, self._version, keep_keys)
        self._loads[future] = buckets
        if engine.serving:
            engine.commands[future] = self.workers.clock()
        else:
            engine.arrival, engine.asked_at = future, self.workers.clock()

    def _load_again(self) -> None:
        """Send the newest weights to the engines that could not fetch them; where they are gone, once they are stored
        again, which the ranks do while they have no other work.

        Raises:
            RanksLostError: the run has to go back to its checkpoint, since no rank has these weights any more.
        """
        without, self._without = self._without, set()  # where the run goes back, all engines fetch other weights
        if self._gone is not None:
            assert self._weights is not None
            if not isinstance(self._source, Elsewhere):
                raise RanksLostError(f"The weights of version {self._version} cannot be fetched because {self._gone}")
            if (shipment := self._source.ship_again(self._version)) is None:
                self._without = without
                return
            self._note(f"The weights of version {self._version} are stored once more because {self._gone}.")
            self._before["weight_bytes"] += shipment.nbytes
            self._before["sent_weight_bytes"] += shipment.nbytes
            self._weights, self._gone = (shipment.whole, self._weights[1]), None
        for engine in without:
            if self._at.get(engine.index) is engine:
                self._ask_load(engine)

    def rest(self) -> None:
        """Let all engines rest, also those that are starting."""
        resting: set[Engine] = set()
        while not resting.issuperset(self._engines):
            self._round(LOOK_S)
            if not all(engine.serving for engine in self._engines):
                continue
            futures = {engine: engine.worker.ask("rest") for engine in self._engines if engine not in resting}
            while not all(future.done() for future in futures.values()):
                self._round(LOOK_S, *futures.values())
            for engine, future in futures.items():
                if not isinstance(future.exception(), LostError):  # its successor is not resting
                    future.result()
                    resting.add(engine)

    def wake(self) -> None:
        for engine in self._engines:
            engine.ask(self.workers.clock(), "wake")

    def let_go(self, owners: Sequence[int]) -> None:
        for engine in self._engines:
            if engine.serving:
                engine.ask(self.workers.clock(), "let_go", list(owners))

    def forget_prefixes(self) -> None:
        for engine in self._engines:
            if engine.serving:
                engine.ask(self.workers.clock(), "forget_prefixes")

    def remember(self, texts: Iterable[Text]) -> None:
        """Pass texts to the present engines; one that is started later drafts from what it samples itself."""
        all_texts = list(texts)
        for engine in self._engines:
            engine.ask(self.workers.clock(), "remember", all_texts)

    # -- what needs nothing here ------------------------------------------------------------------------------------

    def in_thread(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def settle(self) -> None:
        return

    def close(self) -> None:
        for engine in self._engines:
            engine.worker.kill()

    # -- one round --------------------------------------------------------------------------------------------------

    def _round(self, seconds: float, *others: Future[Any]) -> None:
        """Wait for an answer of the engines or of ``others``; then collect results, replace lost engines, send jobs.

        Raises:
            RanksLostError: an engine could not fetch the newest weights, and they are nowhere else.
        """
        self.workers.wait([self._news.any, *others], seconds)
        for engine in self._news.take():
            self._attend(engine, self._read, self._look_after)
        if self.workers.clock() - self._looked >= engines.HEALTH_S / 5:
            self._looked = self.workers.clock()
            self._follow()
            for engine in self._engines:
                self._attend(engine, self._look_after)
        self._dispatch()
        if self._without:  # now that all news is read
            self._load_again()

    def _are_gone(self, why: str) -> None:
        """Note that the stored weights are gone.

        Raises:
            RunError: that has happened too often.
        """
        self._gone = why
        self._times_gone += 1
        if self._times_gone > self._restarts:
            raise RunError(
                f"The stored weights were lost {self._times_gone} times without a newer version (placement.restarts = "
                f"{self._restarts}), the last time because {self._gone}; look into the logs of Ray "
                "(/tmp/ray/session_latest/logs), then use --resume."
            )

    def _follow(self) -> None:
        """Start engines where the cluster has room, and drop those that leave with their nodes."""
        if self._rooms is None:
            return
        for index, room in enumerate(self._rooms.look()):
            engine = self._at.get(index)
            if engine is None:
                if room is Room.FOUND:
                    self._at[index] = self._start(index)
                continue
            was_leaving, engine.leaving = engine.leaving, room is Room.LEAVING
            if room is Room.NONE or (engine.leaving and not engine.jobs):
                self._drop(engine)
                del self._at[index], self._lost[index]
            elif was_leaving and engine.takes_jobs:
                self._least.changed(engine)

    def _attend(self, engine: Engine, *works: Callable[[Engine], None]) -> None:
        """Do ``works`` with an engine; replace it if it is lost. One that was dropped has answers still."""
        if self._at.get(engine.index) is not engine:
            return
        try:
            for work in works:
                work(engine)
        except LostError as error:
            self._replace(engine, str(error).rstrip("."))

    def _read(self, engine: Engine) -> None:
        """Take the answers of an engine.

        Raises:
            LostError: the engine is no more.
        """
        if engine.facts is not None and engine.facts.done():
            self._facts, engine.facts = engine.facts.result(), None
            engine.pid = self._facts.pid
            engine.asked_at = self.workers.clock()
            if self._weights is None:
                self._serve(engine)
            elif self._gone is None:
                self._ask_load(engine)
            else:
                self._without.add(engine)
        if engine.arrival is not None and engine.arrival.done():
            arrival, engine.arrival, engine.asked_at = engine.arrival, None, self.workers.clock()
            if self._done(engine, arrival):
                self._serve(engine)
        ended = engine.take_ended()
        for number in ended:
            self._land(engine, *engine.jobs[number])
            engine.remove(number)
        if ended:
            self._least.changed(engine)
        for future in [future for future in engine.commands if future.done()]:
            del engine.commands[future]
            self._done(engine, future)
        engine.pass_questions(self._judge)

    def _done(self, engine: Engine, command: Future[Any]) -> bool:
        """Return whether an engine has done a command; False if the weights that it was to fetch are no more.

        Raises:
            LostError: the engine is no more.
        """
        try:
            command.result()
        except GoneError as error:
            if (buckets := self._loads.get(command)) is not None:  # of the newest weights
                self._without.add(engine)
                assert self._weights is not None
                if self._gone is None and buckets is self._weights[0]:
                    self._are_gone(str(error).rstrip("."))
            return False
        return True

    def _serve(self, engine: Engine) -> None:
        engine.serving = True
        self._before["engines_joined"] += 1
        self._least.changed(engine)

    def _land(self, engine: Engine, flight: Flight, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, LostError):
            raise error
        if error is not None:
            assert isinstance(error, Exception)
            flight.error = error
        else:
            result = _placed(future.result())
            self._check_version(engine, flight.job, result.tree)
            flight.tree, flight.texts, engine.tally = result
        flight.place = engine.index
        self._landed.append(flight)

    def _check_version(self, engine: Engine, job: Job, tree: TokenTree) -> None:
        sampled = LossVersions.of(tree)
        if job.kept is None and sampled.tokens and sampled.oldest < job.version:
            raise RunError(
                f"Rollout engine {engine.index} sampled with the weights of version {sampled.oldest} for a job that "
                f"needs version {job.version}; this is a defect of rolltree, please report it."
            )

    def _look_after(self, engine: Engine) -> None:
        engine.look_after(self.workers.clock(), hang_s=self._hang_s, start_s=self._start_s)

    def _start(self, index: int) -> Engine:
        worker = self.workers.start("engine", index, self._make, *self._args)
        engine = Engine(index, worker, self._news, self.workers.clock())
        engine.facts = engine.call("facts")
        engine.pass_questions(self._judge)
        return engine

    def _replace(self, engine: Engine, why: str) -> None:
        """Drop an engine and start another in its place."""
        self._drop(engine)
        self._lost[engine.index] += 1
        lost = self._lost.total() if self._rooms is None else self._lost[engine.index]
        if lost > self._restarts:
            which = "" if self._rooms is None else f", all of them number {engine.index},"
            raise RunError(
                f"{lost} rollout engines{which} were lost since the last update of the weights (placement.restarts = "
                f"{self._restarts}), the last because {why}; look into the logs of Ray (/tmp/ray/session_latest/logs)."
            )
        self._at[engine.index] = self._start(engine.index)

    def _drop(self, engine: Engine) -> None:
        """Kill an engine; its jobs begin anew."""
        self._before["engines_left"] += engine.serving
        engine.serving = False
        engine.worker.kill()
        again = [flight for flight, _ in engine.jobs.values()]
        for flight in again:
            flight.begun_anew += 1
        self._pending = again + self._pending
        self._before += engine.tally

    def _dispatch(self) -> None:
        """Send the flights that wait for an engine, those of one engine together."""
        if not self._pending or self._least.find() is None or (self._rooms is not None and self._rooms.few):
            return
        pending, self._pending = self._pending, []
        sent: dict[tuple[Engine, bool], dict[int, Flight]] = {}
        for flight in pending:
            engine = self._near(flight.job) or self._least.find()
            assert engine is not None
            engine.reserve(flight)
            self._least.changed(engine)
            self._numbers += 1
            sent.setdefault((engine, flight in self._held_out), {})[self._numbers] = flight
        for (engine, held_out), flights in sent.items():
            jobs = {number: flight.job for number, flight in flights.items()}
            engine.ask(self.workers.clock(), "run", jobs, held_out)
            for number, flight in flights.items():
                engine.add(number, flight, self._result(engine, number, stays=self._stores and not held_out))

    def _result(self, engine: Engine, number: int, *, stays: bool) -> Future[Any]:
        if stays:
            return self.workers.leave(engine.worker, "stored_result", number, self._tells_texts)
        return engine.worker.ask("result", number)

    def _near(self, job: Job) -> Engine | None:
        """Return the engine that has the keys of a job's prompt, if it takes jobs."""
        engine = None if job.near is None else self._at.get(job.near)
        return engine if engine is not None and engine.takes_jobs else None


def _placed(received: Result | tuple[Result, Reference]) -> Result:
    """Return a result whose tree can be written: arrays that were received may be read-only."""
    if isinstance(received, Result):
        tree = received.tree
        tree.columns = {name: np.array(values) for name, values in tree.columns.items()}
        tree.rewards = {name: np.array(values) for name, values in tree.rewards.items()}
        return received
    (tree, texts, tally), reference = received
    assert isinstance(tree, StoredTree)
    tree.place(TreeOf(reference))
    return Result(tree, None if texts is None else StoredTexts(reference, tree.num_leaves, texts or None), tally)
