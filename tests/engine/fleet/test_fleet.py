"""The fleet over made-up engines that answer, hang, end and load when the test says so, on a clock of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import RunError
from rolltree.engine.fleet.engines import HEALTH_S
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.host import Facts, Health, Result
from rolltree.engine.fleet.questions import Question
from rolltree.engine.fleet.shipping import Elsewhere, Shipment, Shipper, owned
from rolltree.engine.fleet.workers import GoneError, InThreads, Room, Worker
from rolltree.engine.learn.learning import RanksLostError
from rolltree.engine.rewards import RewardItem, RewardResult
from rolltree.engine.rollout import SamplingParams
from rolltree.engine.rollout.packed import unpack_changes, unpack_weights
from rolltree.engine.rollout.sampler import Flight, Job, Kept

HANG_S, START_S = 30.0, 300.0


class Weights:
    """The source of weights of which one number changes, to their version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([7.0] * 4 + [float(self.version)] + [7.0] * 3)}


class Made:
    """An engine that answers a job of seed s with the token s, labelled with its version."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.version, self.weights, self.held = 0, 0.0, torch.zeros(8)
        self.sizes: list[int] = []  # of the weights that it was sent
        self.hung, self.slow, self.resting = False, False, False
        self.jobs: dict[int, Job] = {}
        self.futures: dict[int, Future[Result]] = {}
        self.results: dict[int, Future[Result]] = {}
        self.loads: list[tuple[Future[int], int, Any, int | None]] = []
        self.runs: list[tuple[dict[int, Job], bool]] = []
        self.answers: dict[int, float | None] = {}
        stage.add(self)

    def facts(self) -> Facts:
        return Facts(64, [0], 1)

    def load(self, buckets: list[Any], version: int, keep_keys: bool, since: int | None = None) -> Future[int]:
        fetched = [bucket.get() for bucket in buckets]
        sent = (unpack_weights(fetched) if since is None else unpack_changes(fetched))["w"]
        future: Future[int] = Future()
        if self.stage.gone:
            future.set_exception(GoneError("its rank has ended."))
            return future
        self.loads.append((future, version, sent, since))
        self.sizes.append(len(sent if since is None else sent.patches[0].values))
        return future

    def run(self, jobs: dict[int, Job], held_out: bool) -> None:
        self.runs.append((jobs, held_out))
        self.jobs |= jobs
        new: dict[int, Future[Result]] = {number: Future() for number in jobs}
        self.futures |= new
        self.results |= new

    def result(self, number: int) -> Future[Result]:
        return self.results.pop(number)

    def kept(self, numbers: list[int]) -> list[Kept]:
        return [Kept({"seed": self.jobs[n].seed}, None) if n in self.jobs else Kept(None, None) for n in numbers]

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.jobs.pop(number, None)

    def questions(self) -> Future[list[Question]]:
        self.polled: Future[list[Question]] = Future()
        return self.polled

    def answer(self, values: dict[int, float | None]) -> None:
        self.answers |= values

    def rest(self) -> None:
        self.resting = True

    def wake(self) -> None:
        self.resting = False

    def forget_prefixes(self) -> None: ...

    def score(self, prompts: Any, continuations: Any) -> Any:
        return [[np.full(len(c), -1.0, np.float32) for c in some] for some in continuations]

    def health(self) -> Any:
        if self.hung:
            return Future()
        return Health(self.version, HANG_S + 1 if self.slow else 0.0, None, True, Counter(steps=1))

    # -- told by the test

    def finish_loads(self) -> None:
        for future, version, sent, since in self.loads:
            assert since in (None, self.version)
            if since is None:
                self.held = sent
            else:
                sent.apply(self.held)
            assert self.held.tolist() == [7.0] * 4 + [version] + [7.0] * 3
            self.version, self.weights = version, float(self.held[4])
            future.set_result(version)
        self.loads.clear()

    def finish(self, number: int, *, careless: bool = False) -> bool:
        """Finish a job, if its weights are here."""
        job = self.jobs[number]
        if job.version > self.version and not careless:
            return False
        del self.jobs[number]
        tree = TokenTree.from_sequences(
            list(job.prompt), [[job.seed]], behaviour_logprobs=[np.array([-1.0])], policy_version=self.version
        )
        tree.meta["weights"] = self.weights
        self.futures[number].set_result(Result(tree, [str(job.seed)], Counter(steps=1)))
        return True


class Stage(InThreads):
    """Threads with a clock that moves only while the fleet waits in vain."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, Made] = {}  # by the order in which engines were started, not made
        self._starting = threading.local()
        self.now = 0.0
        self.gone = False  # what was stored
        self.workers: dict[int, Worker] = {}
        self.room: dict[int, Room] = {}  # where it is not FOUND

    def start(self, role: Any, index: int, make: Any, *args: Any) -> Worker:
        place = len(self._started)

        def placed(*args: Any) -> Any:
            self._starting.place = place
            return make(*args)

        self.workers[index] = super().start(role, index, placed, *args)
        return self.workers[index]

    def rooms(self, role: Any, count: int) -> list[Room]:
        return [self.room.get(index, Room.FOUND) for index in range(count)]

    def add(self, made: Made) -> None:
        self._places[self._starting.place] = made

    @property
    def made(self) -> list[Made]:
        return [made for _, made in sorted(self._places.items())]

    def drain(self) -> None:
        """Let all calls that were asked be made."""
        for worker in self._started:
            if not worker._killed:
                with contextlib.suppress(CancelledError):  # it is killed meanwhile
                    worker._calls._thread.submit(int).result(20)

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        self.drain()
        done = {future for future in futures if future.done()}
        if not done:
            self.now += seconds or 0.0
        return done

    def clock(self) -> float:
        return self.now


@contextmanager
def fleet(
    engines: int = 2,
    restarts: int = 100,
    make: Any = Made,
    judge: Any = None,
    sends_changes: bool = False,
    stage: Stage | None = None,
    **bounds: Any,
) -> Iterator[tuple[Fleet, Stage]]:
    stage = stage or Stage()
    made = Fleet(
        stage, engines, make, stage, hang_s=HANG_S, start_s=START_S, restarts=restarts, judge=judge,
        sends_changes=sends_changes, **bounds,
    )  # fmt: skip
    try:
        assert made.longest == 64  # waits for the first
        for _ in range(3):
            made.step(0.01)
        yield made, stage
    finally:
        made.close()


def job(seed: int, n: int = 1, **given: Any) -> Job:
    return Job([1, 2], SamplingParams(n=n, max_new_tokens=4), seed, **given)


def finish_all(stage: Stage) -> None:
    stage.drain()
    for made in stage.made:
        made.finish_loads()
        for number in list(made.jobs):
            made.finish(number)


def steps(made: Fleet, count: int, seconds: float) -> None:
    for _ in range(count):
        made.step(seconds)


def answers(done: list[Flight]) -> list[int]:
    return [int(flight.tree.token_id[-1]) for flight in done if flight.tree is not None]


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4)),
    st.tuples(st.just("finish"), st.integers(0, 1000)),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("hang"), st.integers(0, 2)),
    st.tuples(st.just("stall"), st.integers(0, 2)),
    st.tuples(st.just("weights"), st.just(0)),
    st.tuples(st.just("room"), st.integers(0, 8)),
    st.tuples(st.just("loaded"), st.integers(0, 1000)),
    st.tuples(st.just("step"), st.integers(1, 40)),
)


@pytest.mark.check
@settings(max_examples=60)
@given(st.integers(1, 3), st.lists(ACTIONS, max_size=40), st.booleans(), st.booleans())
def test_every_job_has_one_result_of_weights_that_are_new_enough(
    engines: int, actions: list[tuple[str, int]], sends_changes: bool, follows: bool
) -> None:
    """Deaths, hangs, loads and ends of jobs in any order, and rooms that come and go where the fleet follows them; what
    a lost engine still answers is wrong and ignored."""
    with fleet(engines, sends_changes=sends_changes, least=engines // 2 + 1 if follows else None) as (made, stage):
        needed: dict[Flight, int] = {}
        done: list[Flight] = []
        version = 0
        for what, number in actions:
            stage.drain()
            alive = [m for m in stage.made if not m.hung]
            jobs = [(m, n) for m in alive for n in m.jobs]
            worker = stage.workers[number % engines]
            match what:
                case "submit":
                    flights = made.submit([job(100 + len(needed) + i) for i in range(number)])
                    needed |= dict.fromkeys(flights, version)
                case "finish" if jobs:
                    jobs[number % len(jobs)][0].finish(jobs[number % len(jobs)][1])
                case "end":
                    worker.kill()
                case "hang":
                    stage.made[-1 - number % len(stage.made)].hung = True
                case "stall":
                    stage.made[-1 - number % len(stage.made)].slow = True
                case "room":
                    stage.room[number % engines] = [*Room][number // 3]
                case "weights":
                    version += 1
                    made.load(Weights(version), version, keep_keys=False)
                case "loaded" if alive:
                    alive[number % len(alive)].finish_loads()
                case "step":
                    for _ in range(number):
                        done += made.step(1.0)
        stage.room.clear()
        begin = stage.now
        while len(done) < len(needed):
            finish_all(stage)
            done += made.step(1.0)
            assert stage.now - begin < 3 * (HANG_S + HEALTH_S), "it waits without a limit"
        assert len(set(done)) == len(done) == len(needed)
        assert answers(done) == [flight.job.seed for flight in done]
        for flight, least in needed.items():
            assert flight.tree is not None
            assert flight.texts == [str(flight.job.seed)]
            assert flight.tree.policy_version[-1] >= least
            assert flight.tree.meta["weights"] == flight.tree.policy_version[-1]  # a new engine loaded them first


def test_the_result_of_a_killed_engine_is_never_accepted() -> None:
    with fleet(1) as (made, stage):
        (flight,) = made.submit([job(5)])
        stage.drain()
        (old,) = stage.made
        stage.workers[0].kill()
        old.jobs = {number: job(6) for number in old.jobs}  # another answer than the new engine's
        for number in list(old.jobs):
            old.finish(number)
        assert made.step(0.1) == []
        while not flight.done:
            finish_all(stage)
            made.step(0.1)
        assert answers([flight]) == [5]
        assert flight.begun_anew == 1


@pytest.mark.parametrize("how", ["hung", "slow"])
def test_an_engine_without_steps_is_replaced_in_time(how: str) -> None:
    with fleet(2) as (made, stage):
        flights = made.submit([job(i) for i in range(4)])
        stage.drain()
        setattr(stage.made[0], how, True)
        for number in list(stage.made[1].jobs):
            stage.made[1].finish(number)
        begin = stage.now
        while len(stage.made) == 2:
            made.step(1.0)
        assert stage.now - begin <= HANG_S + 2 * HEALTH_S
        while not all(flight.done for flight in flights):
            finish_all(stage)
            made.step(1.0)
        assert sorted(flight.begun_anew for flight in flights) == [0, 0, 1, 1]


def test_an_engine_that_never_starts_is_replaced_and_many_losses_end_the_run() -> None:
    class Silent(Made):
        def facts(self) -> Any:
            return Future()

    stage = Stage()
    made = Fleet(stage, 1, Silent, stage, hang_s=HANG_S, start_s=START_S, restarts=2)
    with pytest.raises(RunError, match=r"3 rollout engines were lost .*placement\.restarts = 2.*did not start"):
        steps(made, 100, 60.0)
    assert stage.now <= 3 * (START_S + 120)
    made.close()


def test_losses_are_counted_between_two_updates() -> None:
    with fleet(1, restarts=1) as (made, stage):
        for version in range(1, 4):  # one loss for each
            stage.workers[0].kill()
            made.step(1.0)
            made.load(Weights(version), version, keep_keys=False)
        stage.workers[0].kill()
        made.step(1.0)
        stage.workers[0].kill()
        with pytest.raises(RunError, match="2 rollout engines were lost"):
            made.step(1.0)


def test_a_new_engine_loads_the_newest_weights_before_its_first_job() -> None:
    with fleet(1) as (made, stage):
        made.load(Weights(1), 1, keep_keys=False)
        stage.workers[0].kill()
        made.step(1.0)
        (flight,) = made.submit([job(1)])
        for _ in range(5):
            made.step(1.0)
        new = stage.made[-1]
        assert new.loads
        assert not new.jobs
        made.load(Weights(2), 2, keep_keys=False)  # while it loads the first
        stage.drain()
        new.finish_loads()
        made.step(1.0)
        stage.drain()
        assert new.weights == 2.0
        assert len(new.jobs) == 1
        finish_all(stage)
        made.step(1.0)
        assert flight.done


def test_engines_are_sent_what_changed_since_their_weights_and_new_ones_everything() -> None:
    with fleet(2, sends_changes=True) as (made, stage):
        made.load(Weights(1), 1, keep_keys=False)
        made.load(Weights(2), 2, keep_keys=False)  # before the first is used
        finish_all(stage)
        assert [one.sizes for one in stage.made] == [[8, 1], [8, 1]]
        assert made.tally["weight_bytes"] == 2 * 32
        assert made.tally["sent_weight_bytes"] == 32 + 8
        stage.workers[0].kill()
        made.submit([job(1)])  # whose loss is noticed
        for _ in range(5):
            made.step(1.0)
        made.load(Weights(3), 3, keep_keys=False)  # while the new one waits for the second
        finish_all(stage)
        made.step(1.0)
        made.load(Weights(4), 4, keep_keys=False)
        finish_all(stage)
        wait = stage.wait
        with pytest.MonkeyPatch.context() as patch:  # engines that load at once, for which a run that goes back waits
            patch.setattr(stage, "wait", lambda futures, seconds: (finish_all(stage), wait(futures, seconds))[1])
            made.load(Weights(3), 3, keep_keys=False)
        made.load(Weights(4), 4, keep_keys=False)
        finish_all(stage)
        assert [one.sizes for one in stage.made[1:]] == [[8, 1, 1, 1, 8, 1], [8, 8, 1, 8, 1]]
        assert {one.weights for one in stage.made[1:]} == {4.0}


class OfRanks(Elsewhere):
    """The weights of ranks, which are at work when they are asked to store them again, at first."""

    def __init__(self, stage: Stage, version: int, *, busy: int = 0) -> None:
        self.stage, self.busy, self.again = stage, busy, 0
        self.weights = Weights(version)

    def tensors(self) -> Any:
        return self.weights.tensors()

    def digests(self, dtypes: Any) -> Any:
        raise AssertionError("the fleet loads weights, and asks for no digests")

    def ship(self, version: int, since: int | None) -> Shipment:
        return Shipper(self.stage.put).ship(owned(self.tensors()), version, since)

    def ship_again(self, version: int) -> Shipment | None:
        assert version == self.weights.version
        self.busy -= 1
        if self.busy >= 0:
            return None
        self.again += 1
        self.stage.gone = False
        return self.ship(version, None)


def test_weights_that_are_gone_are_stored_once_more_for_the_engines_without_them() -> None:
    said: list[str] = []
    with fleet(3, sends_changes=True, restarts=1, note=said.append) as (made, stage):
        first = OfRanks(stage, 1)
        made.load(first, 1, keep_keys=False)
        finish_all(stage)
        made.step(1.0)
        weights = OfRanks(stage, 2, busy=3)
        made.load(weights, 2, keep_keys=False)
        stage.drain()
        stage.made[0].finish_loads()  # it had fetched them before
        late, _, _, _ = stage.made[2].loads.pop()
        stage.made[1].loads.pop()[0].set_exception(GoneError("its rank has ended."))
        stage.gone = True
        (flight,) = made.submit([job(1)])
        steps(made, 3, 1.0)
        stage.workers[1].kill()  # and another one takes its place
        steps(made, 2, 1.0)
        late.set_exception(GoneError("its rank has ended."))  # that of the first buckets
        for _ in range(9):
            finish_all(stage)
            made.step(1.0)
        assert flight.done
        assert (first.again, weights.again) == (0, 1)
        assert [one.version for one in stage.made] == [2, 1, 2, 2]
        assert [one.sizes for one in stage.made] == [[8, 8], [8, 8], [8, 8, 8], [8]]
        assert said == ["The weights of version 2 are stored once more because its rank has ended."]
        assert made.tally["weight_bytes"] == 3 * 32


def test_weights_that_are_gone_everywhere_take_the_run_back_and_are_sent_whole_again() -> None:
    with fleet(2, sends_changes=True, restarts=2) as (made, stage):
        made.load(Weights(1), 1, keep_keys=False)
        finish_all(stage)
        made.step(1.0)
        stage.gone = True
        made.load(Weights(2), 2, keep_keys=False)
        (flight,) = made.submit([job(1)])
        with pytest.raises(RanksLostError, match=r"weights of version 2 cannot be fetched because its rank has ended$"):
            steps(made, 9, 1.0)
        made.load(Weights(2), 2, keep_keys=False)
        made.load(Weights(3), 3, keep_keys=False)
        stage.drain()
        stage.gone = False
        with pytest.raises(RanksLostError, match="weights of version 3"):  # that of older ones does not count
            made.step(1.0)
        made.load(Weights(3), 3, keep_keys=False)
        finish_all(stage)
        made.step(1.0)
        finish_all(stage)
        made.step(1.0)
        assert flight.done
        assert [one.version for one in stage.made] == [3, 3]
        assert stage.made[0].sizes == [8, 8]


def test_weights_that_are_gone_each_time_end_the_run() -> None:
    with fleet(1, restarts=2) as (made, stage):
        stage.gone = True
        for _ in range(2):
            made.load(Weights(1), 1, keep_keys=False)
            with pytest.raises(RanksLostError):
                made.step(1.0)
        made.load(Weights(1), 1, keep_keys=False)
        with pytest.raises(RunError, match=r"lost 3 times without a newer version \(placement.restarts = 2\)"):
            made.step(1.0)


def test_an_engine_that_samples_with_older_weights_ends_the_run() -> None:
    with fleet(1) as (made, stage):
        made.load(Weights(1), 1, keep_keys=False)
        made.submit([job(1)])
        stage.drain()
        (number,) = stage.made[0].jobs
        stage.made[0].finish(number, careless=True)
        with pytest.raises(RunError, match=r"engine 0 sampled with the weights of version 0 .* needs version 1"):
            made.step(1.0)


def test_jobs_begin_together_at_the_least_loaded_engine_or_where_their_keys_are() -> None:
    with fleet(2) as (made, stage):
        first = made.submit([job(1, n=6), job(2, n=2), job(3, n=2), job(4, n=2), job(5, n=1)])
        stage.drain()
        runs = [[sorted(j.seed for j in jobs.values()) for jobs, _ in m.runs] for m in stage.made]
        assert runs == [[[1, 5]], [[2, 3, 4]]]
        finish_all(stage)
        made.step(1.0)
        assert [flight.place for flight in first] == [0, 1, 1, 1, 0]
        made.submit([job(6, near=1), job(7, near=1)])
        stage.drain()
        assert [j.seed for j in stage.made[1].jobs.values()] == [6, 7]


def test_held_out_problems_are_answered_beside_rollouts() -> None:
    with fleet(1) as (made, stage):
        (flight,) = made.submit([job(1)])
        inner = stage.wait
        stage.wait = lambda futures, seconds: (finish_all(stage), inner(futures, seconds))[1]  # type: ignore[method-assign]
        trees = made.generate([job(8), job(9)])
        assert [int(tree.token_id[-1]) for tree in trees] == [8, 9]
        assert [held_out for _, held_out in stage.made[0].runs] == [False, True]
        assert made.step(1.0) == [flight]  # it ended meanwhile


def test_unfinished_jobs_are_kept_and_dropped() -> None:
    with fleet(2) as (made, stage):
        flights = made.submit([job(i) for i in range(3)])
        resumed = made.submit([job(3, kept={"n": 1})])
        assert [kept.state for kept in made.kept(flights)] == [{"seed": i} for i in range(3)]
        stage.workers[0].kill()
        stage.workers[1].kill()
        assert made.kept([*flights, *resumed]) == [*[Kept(None, None)] * 3, Kept({"n": 1}, None)]
        made.drop(flights)
        while not resumed[0].done:
            finish_all(stage)
            made.step(1.0)
        stage.drain()
        assert not any(m.jobs for m in stage.made[2:])


def test_scores_come_from_an_engine_that_lives() -> None:
    with fleet(2) as (made, stage):
        stage.workers[0].kill()
        found = made.score([[1]], [[[2, 3]]])
        assert found[0][0].tolist() == [-1.0, -1.0]


def test_questions_of_programs_reach_the_verifier_and_answers_only_the_engine_that_asked() -> None:
    asked: list[tuple[list[RewardItem], Future[list[RewardResult]]]] = []

    def judge(items: list[RewardItem]) -> Future[list[RewardResult]]:
        asked.append((items, Future()))
        return asked[-1][1]

    with fleet(2, judge=judge) as (made, stage):
        steps(made, 2, 0.1)
        for number, engine in enumerate(stage.made):
            engine.polled.set_result([Question(7, f"of {number}", {"a": 1}), Question(8, "x", None)])
        steps(made, 2, 0.1)
        assert [items for items, _ in asked] == [
            [RewardItem(f"of {number}", {"a": 1}), RewardItem("x", None)]  # type: ignore[arg-type]
            for number in (0, 1)
        ]
        stage.drain()
        stage.made[0].polled.set_result([Question(9, "more", {})])  # before the first is answered
        stage.workers[1].kill()
        made.submit([job(1), job(2)])
        steps(made, 3, 0.1)
        assert len(asked) == 3
        for value, (items, future) in enumerate(asked):
            future.set_result([RewardResult(value + 0.5 if item.entry else None, None) for item in items])
        steps(made, 3, 0.1)
        stage.drain()
        assert [engine.answers for engine in stage.made] == [{7: 0.5, 8: None, 9: None}, {}, {}]
        assert stage.made[2].polled  # the successor is asked for its own


def test_a_verifier_that_fails_ends_the_run_and_no_question_waits() -> None:
    failed: Future[list[RewardResult]] = Future()
    failed.set_exception(RunError("3 reward hosts were lost"))
    with fleet(1, judge=lambda items: failed) as (made, stage):
        steps(made, 2, 0.1)
        stage.made[0].polled.set_result([Question(0, "text", {})])
        with pytest.raises(RunError, match="reward hosts"):
            steps(made, 3, 0.1)


def test_all_engines_rest_also_the_successor_of_one_that_ends_meanwhile() -> None:
    with fleet(2) as (made, stage):
        rest = stage.made[1].rest

        def ends() -> None:
            rest()
            stage.workers[1].kill()

        stage.made[1].rest = ends  # type: ignore[method-assign]
        made.rest()
        assert len(stage.made) == 3
        assert [engine.resting for engine in stage.made] == [True] * 3
        made.wake()
        stage.drain()
        assert [engine.resting for engine in stage.made] == [False, True, False]  # the second is no more
        (flight,) = made.submit([job(3)])
        while not flight.done:
            finish_all(stage)
            made.step(1.0)
