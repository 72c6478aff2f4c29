"""A thread that has computed gives its OpenMP threads back, and another one's then stay awake between operations."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from ..support.forks import Forks
from ..support.serving import save

pytestmark = pytest.mark.skipif(
    not torch.backends.openmp.is_available() or not sys.platform.startswith("linux"),
    reason="PyTorch computes without OpenMP, or the system counts no threads in /proc",
)
THREADS = """
import os, sys, threading, torch
from rolltree.engine.openmp import release_threads

torch.set_num_threads(int(sys.argv.pop()))

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    return torch.ones(1 << 20).exp().sum().item()
"""
RELEASED = """
compute()
first, before = compute(), threads()
assert release_threads()
print(before - threads(), compute() == first)
"""
SERVED = """
from rolltree.engine.app.server import serve as module

def run(server, sockets):  # in place of serving
    before = threads()
    compute()
    print(threads() - before)

module.Server.run = run
compute()
options = dict(name=None, host="127.0.0.1", port=0, api_key=None, dtype="float32", device="cpu", kv_tokens=4096)
module.serve(sys.argv[1], debug=False, **options)
"""
FORKED = """
from tests.support.forks import forked
compute()
with forked(release_threads) as (process, _):
    process.join(60)
print(process.exitcode)
"""
SWITCHES = """
def switches():
    tasks = os.listdir("/proc/self/task")
    lines = [line for task in tasks for line in open(f"/proc/self/task/{task}/status")]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

def step(found):
    values = torch.ones(1 << 16)
    for _ in range(8):
        before = switches()
        for _ in range(1000):
            values.exp()
        found.append(switches() - before)

compute()
if sys.argv[1] == "released":
    release_threads()
found = []
thread = threading.Thread(target=step, args=(found,))
thread.start()
thread.join()
print(min(found))
"""


def printed(forks: Forks, script: str, *arguments: str, threads: int) -> str:
    given = ["-c", *arguments, str(threads)]
    begin = f"import os, sys\nsys.argv = {given!r}\nos.environ['HF_HUB_OFFLINE'] = '1'\n"
    code, output = forks.run(begin + THREADS + script)
    assert code == 0, output
    return output


@pytest.mark.slow
def test_threads_end_and_come_back(torch_forks: Forks) -> None:
    ended, equal = printed(torch_forks, RELEASED, threads=4).split()
    assert (ended, equal) == ("3", "True")


@pytest.mark.check
def test_a_fork_of_tests_has_no_threads_to_end(torch_forks: Forks) -> None:
    assert printed(torch_forks, FORKED, threads=4).strip() == "0"


@pytest.mark.slow
def test_a_server_computes_with_those_of_the_engine_alone(torch_forks: Forks, tmp_path: Path) -> None:
    told = printed(torch_forks, SERVED, str(save(tmp_path)), threads=4)
    assert told.split()[-1] == "3"  # the main thread has to make them anew


@pytest.mark.slow  # other work on the machine wakes threads too
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_a_thread_waits_awake_once_no_other_has_computed(torch_forks: Forks) -> None:
    def fewest(how: str) -> int:
        return int(printed(torch_forks, SWITCHES, how, threads=len(os.sched_getaffinity(0))))

    assert min(fewest("released") for _ in range(2)) < 200
    assert fewest("kept") > 800, "OpenMP's threads wait awake beside those of other threads: release_threads can go"
