"""Calls of tools and judges: bounded, timed, and never in the way of the others or of the end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from rolltree.engine import LeafStatus, SamplingParams
from rolltree.engine.parts.waiting import waiting
from rolltree.engine.programs import Call, Finish, RolloutProgram
from rolltree.engine.record.failures import kind, unsampled
from rolltree.engine.rollout.calls import CallPool

from ..rollout.test_native_engine import PROMPTS, engine


def finish(pool, futures, seconds=20.0):
    end = time.monotonic() + seconds
    while not all(f.done() for f in futures):
        assert time.monotonic() < end
        wait(futures, 0.01)
        pool.expire()


def test_results_errors_and_time_limits():
    pool, gate = CallPool(), threading.Event()
    good, bad = pool.submit(60, divmod, 7, 2), pool.submit(60, divmod, 1, 0)
    late = pool.submit(0.05, gate.wait)
    finish(pool, [good, bad, late])
    gate.set()
    assert good.result() == (3, 1)
    assert isinstance(bad.exception(), ZeroDivisionError)
    assert isinstance(late.exception(), TimeoutError)
    assert "0.05 s" in str(late.exception())


def test_only_so_many_run_at_once_and_a_hung_one_gives_up_its_place():
    pool, gate, lock = CallPool(at_once=2), threading.Event(), threading.Lock()
    running, most = [0], [0]

    def work():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    futures = [pool.submit(60, work) for _ in range(8)]
    finish(pool, futures)
    assert most[0] == 2
    hung = [pool.submit(0.05, gate.wait) for _ in range(2)]
    after = pool.submit(60, work)
    finish(pool, [*hung, after])
    gate.set()
    assert after.exception() is None


class AskForEver(RolloutProgram):
    """The first branch's judge never returns."""

    call_timeout_s = 0.2
    gate = threading.Event()

    def decide(self, group, finished):
        for segment in finished:
            yield Call(
                segment.branch,
                self.gate.wait if segment.branch == (0,) else time.sleep,
                () if segment.branch == (0,) else (0,),
            )

    def returned(self, group, branch, result):
        return ()

    def __deepcopy__(self, memo):
        return AskForEver()


def test_a_judge_that_hangs_fails_its_leaf_alone():
    native = engine("qwen3")
    (tree,) = native.generate(PROMPTS[:1], SamplingParams(n=3, max_new_tokens=4, ignore_eos=True), AskForEver())
    AskForEver.gate.set()
    assert [LeafStatus(s) for s in tree.status] == [LeafStatus.FAILED, LeafStatus.LENGTH, LeafStatus.LENGTH]
    assert native.stats["failed_calls"] == 1
    assert "did not return within its 0.2 s" in tree.meta["errors"][0]
    assert [kind(why) for why in unsampled(tree).values()] == ["timeout"]


@pytest.mark.slow
def test_a_hung_call_does_not_keep_the_process():
    program = (
        "import time\nfrom rolltree.engine.rollout.calls import CallPool\n"
        "future = CallPool().submit(60, time.sleep, 600)\nprint('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "end\n", done.stderr


@pytest.mark.parametrize("name", ["hints", "mcts"])
def test_judging_programs_need_a_judge_or_a_run(name):
    with pytest.raises(ValueError, match="needs a judge"):
        engine("qwen3").generate(PROMPTS[:1], SamplingParams(n=2, max_new_tokens=4), name)


def test_a_call_that_waits_gives_up_its_place_and_its_time_stands_still():
    pool, gate, order = CallPool(at_once=1), threading.Event(), []

    def wait_for_the_other():
        with waiting():
            assert gate.wait(20)
            time.sleep(0.3)  # longer than the limit
        order.append("first")

    def free():
        order.append("second")
        gate.set()

    futures = [pool.submit(0.2, wait_for_the_other), pool.submit(20, free)]
    finish(pool, futures)
    assert [future.exception() for future in futures] == [None, None]
    assert order == ["second", "first"]
    again = pool.submit(0.1, lambda: [waiting().__enter__, time.sleep(0.3)])
    finish(pool, [again])
    assert isinstance(again.exception(), TimeoutError)
    with waiting():  # outside of calls
        pass


class Slow(RolloutProgram):
    """The first branch's call returns after the second's has been taken."""

    segment_tokens = 4

    def __init__(self, any_order):
        self.takes_any_order, self.gate, self.taken = any_order, threading.Event(), []

    def __deepcopy__(self, memo):
        return self

    def decide(self, group, finished):
        for segment in finished:
            if segment.status is None:
                yield Call(segment.branch, self.gate.wait if segment.branch == (0,) else int, (1.0,))

    def returned(self, group, branch, result):
        self.taken.append(branch)
        self.gate.set()
        yield Finish(branch)


@pytest.mark.parametrize("any_order", [True, False])
def test_results_arrive_in_the_order_of_calls_or_as_they_come(any_order):
    program = Slow(any_order)
    engine().generate(PROMPTS[:1], SamplingParams(n=2, max_new_tokens=8, ignore_eos=True), program)
    assert program.taken == ([(1,), (0,)] if any_order else [(0,), (1,)])
