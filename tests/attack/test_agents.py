"""Many episodes of which most go wrong: each is told by its reason, nothing is counted twice, and nothing is left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.agents.records import EpisodeRecord

from ...support.agents import job, make_engine, sampler
from .calls import sampled_tokens

KINDS = ["well", "crash", "hang", "kill", "leak", "hangup", "key", "silent", "late", "twice"]
AGENT = """
import http.client, json, os, subprocess, sys, time, urllib.error, urllib.request
from urllib.parse import urlsplit

base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
task = json.load(open(os.environ["ROLLTREE_TASK"]))
kind = KINDS[int(os.environ["ROLLTREE_EPISODE"], 16) % len(KINDS)]

def ask(key=key, base=base, **more):
    body = json.dumps({"messages": task["messages"], "max_tokens": 10, **more}).encode()
    asked = urllib.request.Request(base + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(asked))

def hang_up(**more):
    url = urlsplit(base)
    line = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"messages": task["messages"], "max_tokens": 100, "ignore_eos": True, **more})
    line.request("POST", url.path + "/chat/completions", body, {"Authorization": "Bearer " + key})
    line.close()

def refused(code, **asked):
    try:
        ask(**asked)
    except urllib.error.HTTPError as error:
        assert error.code == code, error.code
    else:
        raise AssertionError("it was answered")

if kind == "silent":
    sys.exit(0)
ask()
if kind == "crash":
    raise RuntimeError("broken")
elif kind == "hang":
    time.sleep(99)
elif kind == "kill":
    os.kill(os.getpid(), 9)
elif kind == "leak":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(66.5)"], start_new_session=True)
elif kind == "hangup":
    hang_up()
    hang_up(stream=True)
    time.sleep(0.2)
    ask(temperature=0.5)
elif kind == "key":
    refused(401, key="wrong")
    refused(401, base=base.replace(os.environ["ROLLTREE_EPISODE"], "0" * 16))
    refused(400, temperature=-1)
elif kind == "late":
    child = "import os, time, urllib.request; time.sleep(2)"
    subprocess.Popen([sys.executable, "-c", child])
elif kind == "twice":
    ask(); ask()
json.dump(0.5, open(os.environ["ROLLTREE_REWARD"], "w"))
"""
FAILS = {"crash": "RuntimeError: broken", "hang": "TimeoutError", "kill": "signal 9", "silent": "made no call"}
CALLS = {"silent": 0, "hangup": 2, "twice": 3}


@pytest.mark.slow
def test_what_goes_wrong_stays_in_its_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "faulty.py").write_text(f"KINDS = {KINDS!r}\n{AGENT}")
    engine = make_engine()
    with sampler(engine, command=[sys.executable, str(tmp_path / "faulty.py")], timeout_s=25.0, episodes=10) as made:
        flights = made.submit([job(engine, n=20, seed=seed) for seed in range(2)])
        groups = [made._groups[flight] for flight in flights]
        while not all(flight.done for flight in flights):
            made.step(0.05)
        for flight, group in zip(flights, groups, strict=True):
            check(flight.tree, group.episodes)
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.process_iter() if _of(p, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not engine.loop.busy
    engine.cache.tree.check()


def check(tree: Any, episodes: list[Any]) -> None:
    leaves = tree.columns["episode"].tolist()
    for number, episode in enumerate(episodes):
        kind = KINDS[int(episode.id, 16) % len(KINDS)]
        mine = [leaf for leaf, of in enumerate(leaves) if of == number]
        if kind in FAILS:
            assert all(tree.status[leaf] == LeafStatus.FAILED for leaf in mine)
            assert FAILS[kind] in tree.meta["errors"][mine[0]], (kind, tree.meta["errors"][mine[0]])
            assert not any(leaf in tree.meta.get("given_rewards", {}) for leaf in mine)
        else:
            assert all(tree.meta["given_rewards"][leaf] == 0.5 for leaf in mine), (kind, tree.meta.get("errors"))
        assert len(episode.calls) == CALLS.get(kind, 1), kind
        record = EpisodeRecord(tuple(episode.calls), LeafStatus.STOP)
        wanted = sorted((token, logprob) for _, token, logprob, _ in sampled_tokens([record]))
        rows = [row for leaf in mine for row in tree.path_rows(leaf)[int(tree.leaf_prompt[leaf]) :]]
        trained = sorted((int(tree.token_id[r]), float(tree.behaviour_logprob[r])) for r in rows if tree.loss_mask[r])
        assert trained == wanted, kind


def _of(process: psutil.Process, folder: str) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return process.pid != os.getpid() and (folder in words or "sleep(66.5)" in words)
