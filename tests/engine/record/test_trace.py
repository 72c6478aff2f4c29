"""trace.json: events as Perfetto reads them, and a run's account as such events."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.record.trace import PROCESS, TRACKS, Trace


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events as readers take them: an array that need not be closed."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def check(path: Path) -> dict[tuple[str, str], int]:
    """Check what Perfetto requires of Chrome's events; return the events of each name by track.

    Microseconds, as integers that a double holds; on each thread every event lies within another or behind it; a thread
    is not 0, which is nobody's, and has a name.
    """
    threads: dict[int, list[tuple[int, int, str]]] = {}
    names: dict[int, str] = {}
    for event in events(path):
        assert event["pid"] == PROCESS
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["tid"] >= 1
            assert type(event["ts"]) is type(event["dur"]) is int
            assert 0 <= event["dur"] < event["ts"] < 2**53
            threads.setdefault(event["tid"], []).append((event["ts"], -event["dur"], event["name"]))
    assert {e["args"]["name"] for e in events(path) if e["name"] == "process_name"} == {"rolltree"}
    found: Counter[tuple[str, str]] = Counter()
    for tid, there in threads.items():
        inside: list[int] = []  # ends of the events that one lies within
        for begin, less, name in sorted(there):
            inside = [end for end in inside if end > begin]
            assert all(begin - less <= end for end in inside), "neither within nor behind"
            inside.append(begin - less)
            found[names[tid].rstrip(" 0123456789"), name] += 1
    return found


def test_events_are_joined_named_and_appended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    for begin, end in ((1.0, 1.001), (1.002, 1.003), (1.5, 1.6)):
        trace.add("sampler", "decode", begin, end)
    trace.add("learner", "optimizer", 1.1, 1.4)
    trace.flush()
    trace.add("learner", "gen", 2.0, 2.5)
    trace.flush()
    Trace(path).flush()
    names = [event for event in events(path) if event["name"] == "thread_name"]
    assert {event["tid"]: event["args"]["name"] for event in names} == {1: "learner", 2: "sampler"}
    assert check(path) == {("sampler", "decode"): 2, ("learner", "optimizer"): 1, ("learner", "gen"): 1}
    found = [event for event in events(path) if event["ph"] == "X"]
    lasted = sorted((event["name"], event["tid"], event["dur"]) for event in found)
    assert [event[:2] for event in lasted] == [("decode", 2), ("decode", 2), ("gen", 1), ("optimizer", 1)]
    rounded = pytest.approx([3000, 100_000, 500_000, 300_000], abs=1)  # both ends are
    assert [dur for *_, dur in lasted] == rounded
    begin = {event["name"]: event["ts"] for event in found}
    assert begin["gen"] - begin["optimizer"] == pytest.approx(900_000, abs=2)


def test_calls_at_the_same_time_are_on_threads_of_their_own(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for begin, end in ((1.0, 2.0), (1.5, 2.5), (2.2, 4.0), (4.5, 5.0)):
        trace.add("verifier", "judge", begin, end)
        trace.flush()  # else those that overlap are one
    found = [event for event in events(trace.path) if event["ph"] == "X"]
    assert [event["tid"] for event in found] == [3, 6, 3, 3]
    assert check(trace.path) == {("verifier", "judge"): 4}
    trace.add("verifier", "judge", 7.0, 8.0)
    trace.add("verifier", "judge", 6.5, 7.5)
    trace.flush()
    (*_, last) = events(trace.path)
    assert last["dur"] == pytest.approx(1_500_000, abs=2)


@pytest.mark.parametrize("kept", [0, 1, 40, 90, 10**6])
def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "trace.json"
    first, second = Trace(path), Trace(path)
    for begin in (1.0, 2.0, 3.0):
        first.add("learner", "gen", begin, begin + 0.5)
    first.flush()
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    second.add("learner", "gen", 4.0, 4.5)
    second.flush()
    left = sum(line.startswith(b'{"name": "gen"') for line in whole[:kept].splitlines(keepends=True)[:-1])
    assert check(path) == {("learner", "gen"): 1 + (3 if kept > len(whole) else left)}


def test_a_runs_trace_has_the_seconds_of_its_account(finished_run: Path) -> None:
    rows = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    found = [event for event in events(finished_run / "trace.json") if event["ph"] == "X"]
    for part in ("gen", "pack", "forward_backward", "head", "optimizer", "eval"):
        traced = sum(event["dur"] for event in found if event["name"] == part) / 1e6
        accounted = sum(row[f"timing_s/{part}"] for row in rows)
        # joined events take in the pauses between them; what is in the account is never less
        assert traced >= 0.99 * accounted - 1e-4
        assert traced <= 1.5 * accounted + 0.1
    assert {track for track, _ in check(finished_run / "trace.json")} == set(TRACKS)
    for tid in (1, 2):  # the learner and the sampler do one thing at a time
        spans = sorted((event["ts"], event["dur"]) for event in found if event["tid"] == tid)
        assert all(a + d <= b for (a, d), (b, _) in itertools.pairwise(spans))
