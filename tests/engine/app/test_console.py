"""The console: its lines, its silence outside a terminal, and that nothing a run sends can break it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as RichConsole

from rolltree.engine.app import console as module
from rolltree.engine.app.console import Console

METRICS = {
    "reward/mean": 0.5123,
    "actor/pg_loss": 0.0121,
    "actor/entropy": 0.408,
    "actor/pg_clipfrac": 0.0081,
    "actor/grad_norm": 0.2111,
    "response_length/mean": 23.4,
    "perf/throughput": 21437.0,
    "tree/token_ratio": 1.61,
    "timing_s/step": 1.83,
}


class Clock:
    """Each step takes ``tick`` seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def make(*, terminal: bool, width: int = 200) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    # _environ: the test must not depend on TERM, NO_COLOR or COLUMNS of whoever runs it
    rich = RichConsole(file=out, force_terminal=terminal, width=width, _environ={"TERM": "xterm"})
    return Console(rich), out


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_step_is_one_line(clock: Clock) -> None:
    console, out = make(terminal=False, width=40)
    console.start(150)
    clock.now += 1.8
    console.step(150, METRICS)
    assert out.getvalue() == (
        "step 150/150 | reward 0.512 | loss 0.012 | ent 0.41 | clip 0.8% | gnorm 0.21 | len 23 | 21.4k tok/s "
        "| ratio 1.6x | 1.8 s\n"
    )


def test_without_a_terminal_lines_are_periodic_and_first_and_last_always_come(clock: Clock) -> None:
    console, out = make(terminal=False)
    console.start(30)
    for step in range(1, 31):
        clock.now += 4.0
        console.step(step, METRICS)
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]
    assert shown == [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 30]
    assert "\x1b" not in out.getvalue()


def test_time_left_follows_the_pace_of_this_process_after_a_resume(clock: Clock) -> None:
    console, out = make(terminal=False)
    console.start(1000)
    clock.now += 10
    console.step(901, {})
    assert out.getvalue() == "step  901/1000 | 16:30 left\n"
    clock.now += 110
    console.step(902, {})
    assert out.getvalue().splitlines()[1].endswith("1:38:00 left")


@pytest.mark.parametrize("terminal", [True, False])
def test_missing_and_odd_metrics_never_break_a_line(terminal: bool, clock: Clock) -> None:
    console, out = make(terminal=terminal)
    with console:
        console.phase("before [start")
        console.start(3)
        console.phase("sampling [/nonsense] [red]")
        console.step(1, {})
        clock.now += 60
        console.step(2, {"reward/mean": float("nan"), "actor/grad_norm": float("inf"), "other": 1.0})
        console.step(3, {"perf/throughput": 2_500_000.0})
        console.step(4, {})
        console.note("dropped [3] of [bold]12")
        console.finish(["done [see report]"])
    text = plain(out.getvalue())
    assert "reward nan | gnorm inf" in text
    assert "2.5M tok/s" in text
    assert "dropped [3] of [bold]12" in text
    assert "done [see report]" in text


def test_evaluations_stand_out_and_compare_with_the_first() -> None:
    console, out = make(terminal=True)
    console.start(10)
    console.evaluation(0, 0.3, 512, [], None)
    console.evaluation(10, 0.62, 512, ["right", "tests"], 0.5)
    console.close()
    text = plain(out.getvalue()).replace("\r", "")
    assert "evaluation after step 0: 30.0 % of 512 held-out problems are right\n" in text
    said = "62.0 % of 512 held-out problems are right by 'right' and 'tests' (+32.0 points since the first)"
    assert f"{said}, mean reward 0.5\n" in text
    assert "\x1b[1;32m" in out.getvalue()


def test_a_failure_inside_restores_the_terminal() -> None:
    console, out = make(terminal=True)

    def fail() -> None:
        with console:
            console.start(10)
            assert "\x1b[?25l" in out.getvalue()  # cursor hidden by the live display
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "\x1b[?25h" in out.getvalue()
    console.close()


@pytest.mark.parametrize(("share", "shown"), [(0.0, ""), (0.05, ""), (0.06, "6% UNPARSED"), (1.0, "100% UNPARSED")])
def test_many_responses_without_an_answer_are_in_the_line(clock: Clock, share: float, shown: str) -> None:
    console, out = make(terminal=False)
    console.start(1)
    console.step(1, METRICS | {"reward/unparsed_ratio": share})
    assert ("UNPARSED" in out.getvalue()) == bool(shown)
    assert shown in out.getvalue()
