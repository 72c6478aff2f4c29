"""Reward hosts over made-up verifiers that answer, hang and end when the test says so, on a clock of its own; and with
real verifier processes in threads. The same in processes of Ray: `test_scale_ray.py`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.engine.errors import RunError, UserError
from rolltree.engine.fleet.hosted import AHEAD, HEALTH_S, LOOK_S, REPLACE_S, HostedRewards, HostFacts, RewardHost
from rolltree.engine.fleet.workers import InThreads, Worker
from rolltree.engine.rewards import RewardItem, RewardResult
from rolltree.engine.settings import RewardConfig

HANG_S, START_S, TIMEOUT_S = 30.0, 300.0, 4.0


class Made:
    """A host that gives the item ``"7"`` the reward 7 when the test says so."""

    def __init__(self, config: RewardConfig, tasks: Sequence[Any]) -> None:
        self.hung, self.wrong = False, 0.0
        self.asked: list[tuple[Future[list[RewardResult]], Sequence[RewardItem]]] = []
        Stage.made.append(self)

    def facts(self) -> Any:
        return Future() if self.hung else HostFacts("contained", 1)

    def score(self, items: Sequence[RewardItem]) -> Future[list[RewardResult]]:
        future: Future[list[RewardResult]] = Future()
        self.asked.append((future, items))
        return future

    def check(self, entries: Sequence[dict[str, Any]]) -> list[str | None]:
        return [entry["why"] for entry in entries]

    def finish(self) -> None:
        if self.asked and not self.hung:
            future, items = self.asked.pop(0)
            future.set_result([RewardResult(float(item.response_text) + self.wrong, None) for item in items])


class Stage(InThreads):
    """Threads with a clock that moves only while the rewards wait in vain."""

    made: list[Made] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.made.clear()
        self.now = 0.0
        self.hosts: dict[int, Worker] = {}

    def start(self, role: Any, index: int, make: Any, *args: Any) -> Worker:
        assert role == "reward"
        self.hosts[index] = super().start(role, index, make, *args)
        return self.hosts[index]

    def object(self, index: int) -> Made:
        made: Made = self.hosts[index]._calls._object.result(20)  # type: ignore[attr-defined]
        return made

    def drain(self) -> None:
        """Let all calls that were asked be made."""
        for worker in self._started:
            if not worker._killed:
                worker._calls._thread.submit(int).result(20)

    def wait(self, futures: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
        self.drain()
        done = {future for future in futures if future.done()}
        if not done:
            self.now += seconds or 0.0
        return done

    def clock(self) -> float:
        return self.now


def config(**given: Any) -> RewardConfig:
    return RewardConfig(**{"verifier": "exact", "hosts": 2, "workers": 1, "timeout_s": TIMEOUT_S} | given)


@contextmanager
def rewards(
    hosts: int = 2, restarts: int = 100, make: Any = Made, **given: Any
) -> Iterator[tuple[HostedRewards, Stage]]:
    """Make rewards without a thread: the test makes the rounds."""
    stage = Stage()
    made = HostedRewards(
        config(hosts=hosts, **given), (), stage, hang_s=HANG_S, start_s=START_S, restarts=restarts, make=make
    )
    try:
        yield made, stage
    finally:
        made.close()


def items(*numbers: float) -> list[RewardItem]:
    return [RewardItem(str(number), {}) for number in numbers]


def rounds(made: HostedRewards, count: int) -> None:
    for _ in range(count):
        made._round()


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 9)),
    st.tuples(st.just("finish"), st.integers(0, 1000)),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(st.just("hang"), st.integers(0, 2)),
    st.tuples(st.just("round"), st.integers(1, 40)),
)


@settings(max_examples=60)
@given(st.integers(1, 3), st.lists(ACTIONS, max_size=40))
def test_every_item_has_one_verdict(hosts: int, actions: list[tuple[str, int]]) -> None:
    """Ends, hangs and answers in any order; what a lost host still answers is wrong and ignored."""
    with rewards(hosts) as (made, stage):
        asked: list[tuple[Future[list[Any]], list[float]]] = []
        count = 0
        for what, number in actions:
            stage.drain()
            match what:
                case "ask":
                    numbers = [float(count + i) for i in range(number)]
                    asked.append((made.ask("score", items(*numbers)), numbers))
                    count += number
                case "finish" if stage.made:
                    stage.made[number % len(stage.made)].finish()
                case "end":
                    stage.hosts[number % hosts].kill()
                    stage.object(number % hosts).wrong = 0.5
                case "hang" if stage.made:
                    stage.made[-1 - number % len(stage.made)].hung = True
                case "round":
                    rounds(made, number)
        begin = stage.now
        while not all(future.done() for future, _ in asked):
            stage.drain()
            present = [stage.object(index) for index in range(hosts)]
            for host in stage.made:
                if host not in present:
                    host.hung, host.wrong = False, 0.5
                host.finish()
            made._round()
            assert stage.now - begin < 3 * (HANG_S + HEALTH_S + LOOK_S), "it waits without a limit"
        for future, numbers in asked:
            assert [result.value for result in future.result()] == numbers


def test_the_verdict_of_a_killed_host_is_never_accepted() -> None:
    with rewards(1) as (made, stage):
        rounds(made, 2)
        future = made.ask("score", items(5))
        rounds(made, 1)
        stage.drain()
        (old,) = stage.made
        stage.hosts[0].kill()
        old.wrong = 1.0
        old.finish()
        rounds(made, 3)
        assert not future.done()
        assert made.asked_again == 1
        stage.drain()
        stage.made[-1].finish()
        rounds(made, 1)
        assert future.result()[0].value == 5


def test_the_least_loaded_host_is_asked_and_none_gets_more_than_it_can_begin() -> None:
    with rewards(3) as (made, stage):
        assert made.at_once == 3 * AHEAD
        rounds(made, 2)
        for count in (6, 1, 1, 1):  # chunks have two items
            made.ask("score", items(*range(count)))
        rounds(made, 1)
        stage.drain()
        assert [[len(asked) for _, asked in host.asked] for host in stage.made] == [[2, 1], [2, 1], [2, 1]]
        made.ask("score", items(9))
        rounds(made, 1)
        stage.drain()
        assert [len(host.asked) for host in stage.made] == [AHEAD] * 3  # the last waits in the queue
        stage.made[1].finish()
        rounds(made, 1)
        stage.drain()
        assert [float(asked[-1].response_text) for _, asked in stage.made[1].asked] == [0, 9]


@pytest.mark.parametrize("how", ["hung", "stuck"])
def test_a_host_without_answers_is_replaced_in_time(how: str) -> None:
    """Hung: its process gives no answer. Stuck: it answers, but its verifiers judge no longer."""
    with rewards(1) as (made, stage):
        rounds(made, 2)
        future = made.ask("score", items(1, 2, 3, 4))
        rounds(made, 1)
        stage.drain()
        stage.made[0].hung = how == "hung"
        begin, allowed = stage.now, 0.0 if how == "hung" else 4 * (TIMEOUT_S + REPLACE_S)
        while len(stage.made) == 1:
            if how == "stuck":
                assert stage.now - begin <= HANG_S + allowed + 2 * LOOK_S
            rounds(made, 1)
        assert HANG_S <= stage.now - begin <= HANG_S + allowed + HEALTH_S + 2 * LOOK_S
        assert made.asked_again == 4
        assert stage._started[0]._killed
        while not future.done():
            stage.drain()
            stage.made[-1].finish()
            rounds(made, 1)
        assert [result.value for result in future.result()] == [1, 2, 3, 4]


def test_many_losses_without_an_answer_end_the_run() -> None:
    with rewards(1, restarts=2) as (made, stage):
        rounds(made, 2)
        for _ in range(4):  # losses with answers between them do not
            stage.hosts[0].kill()
            rounds(made, 10)
            future = made.ask("score", items(1))
            while not future.done():
                rounds(made, 1)
                stage.drain()
                stage.made[-1].finish()
        for _ in range(2):
            stage.hosts[0].kill()
            rounds(made, 10)  # an idle host's end is found with the next question
        stage.hosts[0].kill()
        with pytest.raises(RunError, match=r"3 reward hosts were lost without an answer \(placement\.restarts = 2\)"):
            rounds(made, 10)


def test_items_that_end_every_host_end_the_run_although_others_are_answered() -> None:
    with rewards(2, restarts=2) as (made, stage):
        rounds(made, 2)
        made.ask("score", items(666))

        def answer_another_and_end_the_host_of_666() -> None:
            other = made.ask("score", items(1))
            while not other.done():
                rounds(made, 1)
                stage.drain()
                for host in stage.made:
                    host.finish() if host.asked and host.asked[0][1][0].response_text == "1" else None
            for host in made._hosts:
                if any(chunk.values[0].response_text == "666" for chunk in host.chunks.values()):
                    stage.hosts[host.index].kill()
            rounds(made, 2)

        for _ in range(2):
            answer_another_and_end_the_host_of_666()
        with pytest.raises(RunError, match="3 reward hosts were lost"):
            answer_another_and_end_the_host_of_666()


def test_a_host_that_never_starts_is_replaced() -> None:
    class Silent(Made):
        def facts(self) -> Any:
            return Future()

    with rewards(1, restarts=1, make=Silent) as (made, stage):
        with pytest.raises(
            RunError, match=r"2 reward hosts .* because it did not start .placement.start_s. within 300 s"
        ):
            made.__enter__()
        assert stage.now <= 2 * (START_S + 10)


def test_an_error_of_the_verifier_reaches_the_caller_and_no_other() -> None:
    with rewards(1) as (made, stage):
        rounds(made, 2)
        broken, other = made.ask("score", items(1, 2, 3)), made.ask("score", items(4))
        rounds(made, 1)
        stage.drain()
        stage.made[0].asked.pop(0)[0].set_exception(UserError("It no longer loads."))
        while not other.done():
            rounds(made, 1)
            stage.drain()
            stage.made[0].finish()
        with pytest.raises(UserError, match="no longer loads"):
            broken.result(0)
        assert other.result()[0].value == 4


def test_rows_are_checked_and_no_items_need_no_host() -> None:
    with rewards() as (made, _):
        rounds(made, 2)
        future = made.ask("check", [{"why": None}, {"why": "no answer"}, {"why": None}])
        rounds(made, 3)
        assert future.result() == [None, "no answer", None]
        assert made.ask("score", []).result() == []
        assert made.note == "contained"


# -- with verifier processes ------------------------------------------------------------------------------------------

MINE = """
import os, time

def judge(text, entry):
    if text == "hang":
        while True: pass
    if text == "die":
        os._exit(3)
    return float(text) + entry["add"]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.slow
def test_hosts_of_verifier_processes_keep_order_and_the_rules_of_a_pool(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RewardHost] = []

    def make(*args: Any) -> RewardHost:
        made.append(RewardHost(*args))
        return made[-1]

    before = set(psutil.Process().children(recursive=True))
    given = config(verifier=f"{mine}:judge", timeout_s=0.5, workers=2)
    judging = HostedRewards(given, (), InThreads(), hang_s=HANG_S, start_s=START_S, restarts=3, make=make)
    with judging:
        texts = [str(i) for i in range(100)] + ["hang", "die"]
        found = judging.score([RewardItem(text, {"add": 0.25}) for text in texts])
        assert [result.value for result in found[:100]] == [i + 0.25 for i in range(100)]
        assert found[100:] == [RewardResult(None, "timeout"), RewardResult(None, "died")]
        assert judging.asked_again == 0
        judging._hosts[0].worker.kill()  # while nothing is asked
        assert judging.score([RewardItem("1", {"add": 1})])[0].value == 2
        while len(made) < 3 or not all(host.serving for host in judging._hosts):
            time.sleep(0.01)
    with pytest.raises(ValueError, match="reward hosts are closed"):
        judging.score([RewardItem("1", {"add": 1})])
    for host in made:  # a thread cannot be killed; a process ends and takes them along
        host.rewards.close()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_caller_that_waits_is_told_that_the_hosts_are_closed(mine: Path) -> None:
    made = HostedRewards(config(hosts=1), (), InThreads(), hang_s=HANG_S, start_s=START_S, restarts=3, make=Made)
    Stage.made.clear()
    with made:
        future = made.ask("score", items(1))
        time.sleep(0.05)
    with pytest.raises(ValueError, match="reward hosts are closed"):
        future.result(10)


def test_a_verifier_that_cannot_be_loaded_is_the_users_mistake(mine: Path) -> None:
    made = HostedRewards(
        config(verifier=f"{mine}:nobody", hosts=1), (), InThreads(), hang_s=HANG_S, start_s=START_S, restarts=3
    )
    with pytest.raises(UserError, match=r"The verifier '.*mine\.py:nobody' \(reward\.verifier\) cannot be used"):
        made.__enter__()
    with pytest.raises((UserError, ValueError)):
        made.score(items(1))
