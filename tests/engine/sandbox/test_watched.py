"""Watched commands: their streams and statuses, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolltree.engine.sandbox.watched import watched

SLEEPER = "setsid sleep {0} & (setsid bash -c 'setsid sleep {0} & exit' &); trap '' TERM; echo up; sleep {0}"
"""A command whose descendants leave its session and lose their parents, and which does not end by SIGTERM."""


@pytest.mark.parametrize(("script", "code", "out", "err"), [
    ("cat; exit 3", 3, "hello", ""), ("kill -9 $$", 137, "", ""), ("echo no >&2; exit 0", 0, "", "no\n"),
])  # fmt: skip
def test_streams_and_status_are_the_commands(script: str, code: int, out: str, err: str) -> None:
    run = subprocess.run(watched(["bash", "-c", script]), input="hello", capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (code, out, err)


def test_a_program_that_is_not_there_is_told() -> None:
    run = subprocess.run(watched(["no-such-program"]), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (127, "no-such-program: No such file or directory\n")


def sleepers(mark: str) -> int:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return sum(line == f"sleep\0{mark}\0".encode() for line in lines)


@pytest.mark.check(but=1)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("how", ["terminated", "parent killed"])
def test_nothing_is_left(how: str) -> None:
    mark = str(2000 + os.getpid())
    command = ["bash", "-c", SLEEPER.format(mark)]
    if how == "terminated":
        process = subprocess.Popen(watched(command), stdout=subprocess.PIPE, start_new_session=True)
    else:
        script = (
            "import subprocess, time\nfrom rolltree.engine.sandbox.watched import watched\n"
            f"subprocess.Popen(watched({command!r}), start_new_session=True)\ntime.sleep(60)"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    for _ in range(100):
        if sleepers(mark) == 3:
            break
        time.sleep(0.05)
    assert sleepers(mark) == 3
    process.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGKILL)
    process.wait()
    for _ in range(100):
        if not (left := sleepers(mark)):
            break
        time.sleep(0.1)
    assert left == 0
