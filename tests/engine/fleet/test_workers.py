"""Workers in threads: order of calls, errors, ends. The same through Ray: `test_scale_ray.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from rolltree.engine.fleet.workers import InThreads, LostError, Reference


class Thing:
    """An object of a worker; it remembers what it was asked."""

    def __init__(self, start: int) -> None:
        self.asked, self.waiting = [start], Future[str]()

    def add(self, number: int) -> list[int]:
        self.asked.append(number)
        return list(self.asked)

    def later(self) -> Future[str]:
        return self.waiting

    def now(self) -> None:
        self.waiting.set_result("now")

    def fail(self) -> None:
        raise ZeroDivisionError("of the thing")

    def total(self, numbers: Reference) -> int:
        return sum(numbers.get())


class Stuck(Thing):
    """An object whose calls wait for an event."""

    go_on = threading.Event()

    def add(self, number: int) -> list[int]:
        self.go_on.wait(20)
        return super().add(number)


def broken(start: int) -> Thing:
    raise KeyError("cannot be made")


@pytest.fixture
def workers() -> Iterator[InThreads]:
    made = InThreads()
    yield made
    made.close()


def test_calls_run_in_the_order_in_which_they_were_asked(workers: InThreads) -> None:
    worker = workers.start("engine", 0, Thing, 7)
    answers = [worker.ask("add", number) for number in range(20)]
    assert answers[-1].result(20) == [7, *range(20)]
    assert [len(answer.result(20)) for answer in answers] == list(range(2, 22))


def test_a_future_of_the_worker_is_the_answer_and_keeps_no_call_waiting(workers: InThreads) -> None:
    worker = workers.start("engine", 0, Thing, 0)
    later = worker.ask("later")
    assert worker.ask("add", 1).result(20) == [0, 1]
    assert not later.done()
    worker.ask("now")
    assert later.result(20) == "now"


def test_errors_of_the_worker_and_of_making_it_are_raised(workers: InThreads) -> None:
    with pytest.raises(ZeroDivisionError, match="of the thing"):
        workers.start("rank", 0, Thing, 0).ask("fail").result(20)
    with pytest.raises(KeyError, match="cannot be made"):
        workers.start("rank", 1, broken, 0).ask("add", 1).result(20)


def test_a_stored_value_reaches_any_worker(workers: InThreads) -> None:
    stored = workers.put([1, 2, 3])
    some = [workers.start("reward", i, Thing, 0) for i in range(2)]
    assert [worker.ask("total", stored).result(20) for worker in some] == [6, 6]


def test_the_end_of_a_worker_fails_all_that_it_owes_and_nothing_comes_later(workers: InThreads) -> None:
    worker, other = workers.start("engine", 0, Stuck, 0), workers.start("engine", 1, Thing, 5)
    first, second = worker.ask("add", 1), worker.ask("add", 2)
    worker.kill()
    for answer in (first, second, worker.ask("add", 3)):
        with pytest.raises(LostError, match="engine 0 was killed"):
            answer.result(20)
    Stuck.go_on.set()  # the thread continues; its answer is discarded
    assert other.ask("add", 1).result(20) == [5, 1]
    with pytest.raises(LostError):
        first.result(20)


def test_waiting_ends_with_the_first_answer_or_after_the_time(workers: InThreads) -> None:
    worker = workers.start("engine", 0, Thing, 0)
    later = worker.ask("later")
    assert workers.wait([later], 0.01) == set()
    soon = worker.ask("add", 1)
    assert workers.wait([later, soon], 20) == {soon}
