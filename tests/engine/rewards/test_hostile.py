"""Verifiers that fork, daemonise, write where they should not and end their process: only their own item suffers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rolltree.engine.rewards import RewardItem, RewardPool, RewardResult
from rolltree.engine.settings import RewardConfig

from ...support.forks import forked

HOSTILE = """
import ctypes, os, signal, subprocess, sys, threading, time

def note(entry, pid):
    with open(entry["pids"], "a") as file:
        file.write(f"{pid}\\n")

def child(entry):
    note(entry, subprocess.Popen(["sleep", "60"]).pid)

def session(entry):
    note(entry, subprocess.Popen(["sleep", "60"], start_new_session=True).pid)

def daemon(entry):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note(entry, os.getpid())
            time.sleep(60)
        os._exit(0)
    os.wait()

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError

def write(first, last):
    for fd in range(first, last):
        try:
            os.set_blocking(fd, False)
            os.write(fd, b"\\x00\\x00\\xff\\xff" * 1000)
        except OSError:
            pass

def judge(text, entry):
    what, _, then = text.partition(" ")
    if what in ("child", "session", "daemon"):
        globals()[what](entry)
    if what == "fork" and os.fork():
        time.sleep(0.2)
    if what == "low":
        write(3, 20)
    if what == "all":
        write(3, 1100)
    if what == "close":
        os.closerange(3, 1100)
    if what == "exit":
        sys.exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "group":
        os.killpg(0, signal.SIGKILL)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "later":
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    if what == "unprintable":
        raise Unprintable
    if what == "surrogate":
        raise ValueError("\\ud800")
    if what == "value":
        return float(then)
    if then == "hang":
        time.sleep(60)
    return 1.0
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(HOSTILE)
    return tmp_path


def pool(mine: Path, **options: object) -> RewardPool:
    given = {"workers": 1, "timeout_s": 0.5} | options
    return RewardPool(RewardConfig(verifier=f"{mine / 'mine.py'}:judge", **given))  # type: ignore[arg-type]


def items(mine: Path, *texts: str) -> list[RewardItem]:
    return [RewardItem(text, {"pids": str(mine / "pids")}) for text in texts]


def pids(mine: Path) -> list[int]:
    return [int(word) for word in (mine / "pids").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(found: list[int], within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(alive, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, found))


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("how", ["child", "session", "daemon"])
def test_nothing_below_a_verifier_outlives_its_time_out_or_the_run(mine: Path, how: str) -> None:
    with pool(mine) as judges:
        assert judges.score(items(mine, f"{how} hang", "plain")) == [
            RewardResult(None, "timeout"),
            RewardResult(1.0, None),
        ]
        first = pids(mine)
        assert len(first) == 1
        assert gone(first)
        assert judges.score(items(mine, how)) == [RewardResult(1.0, None)]
        deadline = time.monotonic() + 10
        while not (second := pids(mine)[1:]) and time.monotonic() < deadline:
            time.sleep(0.01)  # a daemon tells its number after its parent has ended
        assert any(map(alive, second))  # while the run goes on it may have helpers
    assert not any(map(alive, second))  # close() returns when all are gone


@pytest.mark.parametrize("killed", ["run", "worker"])
def test_nothing_below_a_verifier_outlives_its_process(mine: Path, killed: str) -> None:
    def judge() -> None:
        pool = RewardPool(RewardConfig(verifier=f"{mine / 'mine.py'}:judge", workers=1, timeout_s=50)).__enter__()
        print(pool._workers[0].process.pid)
        pool.score([RewardItem("daemon hang", {"pids": str(mine / "pids")})])

    with forked(judge) as (run, printed):
        keeper = int(printed.readline())
        deadline = time.monotonic() + 10
        while not (mine / "pids").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        workers = children(keeper)
        found = [keeper, *workers, *pids(mine)]
        assert len(found) >= 3
        assert all(map(alive, found))
        os.kill(run.pid if killed == "run" else workers[0], signal.SIGKILL)
        run.join()  # with its worker gone the verdict is 'died', and the run ends
    assert gone(found)


def children(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [p for p, parent in parents.items() if parent == pid]


@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("all", "died"),
        ("close", "died"),
        ("kill", "died"),
        ("group", "died"),
        ("segfault", "died"),
        ("stop", "timeout"),
        ("exit", "SystemExit: 0 (line {} of 'mine.py')"),
        ("unprintable", "Unprintable (line {} of 'mine.py')"),
        ("surrogate", "ValueError: \\ud800 (line {} of 'mine.py')"),
        ("value 1e39", "the verifier returned 1e+39, which is not finite in fp32"),
        ("value -3.5e38", "the verifier returned -3.5e+38, which is not finite in fp32"),
        ("value nan", "the verifier returned nan, which is not finite in fp32"),
        ("value inf", "the verifier returned inf, which is not finite in fp32"),
    ],
)
def test_what_goes_wrong_is_named_and_concerns_one_item(mine: Path, text: str, reason: str) -> None:
    line = HOSTILE.splitlines().index(f'    if what == "{text}":') + 2 if "{}" in reason else 0
    begin = time.monotonic()
    with pool(mine, timeout_s=2.0) as judges:
        results = judges.score(items(mine, "a", text, "b"))
        again = judges.score(items(mine, "c"))
    assert results == [RewardResult(1.0, None), RewardResult(None, reason.format(line)), RewardResult(1.0, None)]
    assert again == [RewardResult(1.0, None)]
    assert time.monotonic() - begin < 60  # it does not hang; how long a process takes to start is not the point


def test_what_does_not_touch_the_answers_changes_none(mine: Path) -> None:
    texts = ["low", "fork", "value 3.4028235e38", "value -1e-46", "child", "a"]
    with pool(mine, timeout_s=10.0) as judges:
        assert [r.value for r in judges.score(items(mine, *texts))] == [1, 1, 3.4028235e38, -1e-46, 1, 1]


@pytest.mark.check
def test_a_worker_that_stops_reading_is_timed_out(mine: Path) -> None:
    with pool(mine) as judges:
        assert judges.score(items(mine, "later"))[0].value == 1
        time.sleep(0.3)
        results = judges.score(items(mine, *["x" * 3_000_000] * 3))
    assert [r.reason for r in results] == ["timeout", None, None]


@pytest.mark.parametrize("timeout_s", [1e10, 1e300])
def test_a_time_limit_beyond_every_timer(mine: Path, timeout_s: float) -> None:
    with pool(mine, timeout_s=timeout_s) as judges:
        assert judges.score(items(mine, "a"))[0].value == 1
