"""Agents that crash, hang, are killed or hang up, requests of any kind, and runs that are killed.

Each failure stays in its episode and is reported, nothing is lost or counted twice, and no process is left.

`make attack` runs 200 episodes, 10,000 requests and 10 kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.agents.records import EpisodeRecord

from ..engine.agents.calls import sampled_tokens
from ..engine.agents.test_door import CHAT, group
from ..engine.agents.test_started_runs import write
from ..support.agents import job, make_engine, sampler
from ..support.processes import Process, forking

KINDS = ["well", "crash", "hang", "kill", "leak", "hangup", "stream", "key", "silent", "late", "twice"]
AGENT = """
import http.client, json, os, subprocess, sys, time, urllib.error, urllib.request
from urllib.parse import urlsplit

base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
task = json.load(open(os.environ["ROLLTREE_TASK"]))
kind = KINDS[int(os.environ["ROLLTREE_EPISODE"], 16) % len(KINDS)]
with open(OTHERS, "a") as file:
    file.write(base + " " + key + "\\n")

def ask(key=key, base=base, **more):
    body = json.dumps({"messages": task["messages"], "max_tokens": 10, **more}).encode()
    asked = urllib.request.Request(base + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(asked))

def hang_up(read=False, **more):
    url = urlsplit(base)
    line = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"messages": task["messages"], "max_tokens": 400, "ignore_eos": True, **more})
    line.request("POST", url.path + "/chat/completions", body, {"Authorization": "Bearer " + key})
    if read:
        assert b"data: " in line.getresponse().read(20)
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
elif kind == "stream":
    hang_up(read=True, stream=True)
    ask(temperature=0.5)
elif kind == "key":
    refused(401, key="wrong")
    refused(401, base=base.replace(os.environ["ROLLTREE_EPISODE"], "0" * 16))
    for line in open(OTHERS):
        other, its_key = line.split()
        if its_key != key:
            refused(401, key=its_key)
    refused(400, temperature=-1)
elif kind == "late":
    child = "import os, time, urllib.request; time.sleep(2)"
    subprocess.Popen([sys.executable, "-c", child])
elif kind == "twice":
    ask(); ask()
json.dump(0.5, open(os.environ["ROLLTREE_REWARD"], "w"))
"""
FAILS = {
    "crash": ("exit", "RuntimeError: broken"), "hang": ("timeout", "TimeoutError"), "kill": ("signal", "signal 9"),
    "silent": ("silent", "made no call"),
}  # fmt: skip
"""Kinds of episodes that fail, with the cause in the metrics and a part of the reason."""
HUNG_UP = {"hangup": 2, "stream": 1}
"""Calls whose clients hang up."""
CALLS = {"silent": 0, "hangup": 2, "stream": 2, "twice": 3}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_goes_wrong_stays_in_its_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    others = tmp_path / "others"
    (tmp_path / "faulty.py").write_text(f"KINDS = {KINDS!r}\nOTHERS = {str(others)!r}\n{AGENT}")
    engine, n = make_engine(), max(20, cases // 40)
    words = [sys.executable, str(tmp_path / "faulty.py")]
    seen: Counter[str] = Counter()
    with sampler(engine, command=words, timeout_s=40.0, episodes=10) as made:
        flights = made.submit(
            [job(engine, n=n, seed=seed, max_new_tokens=440) for seed in range(4 if cases > 40 else 2)]
        )
        groups = [made._groups[flight] for flight in flights]
        while not all(flight.done for flight in flights):
            made.step(0.05)
        for flight, some in zip(flights, groups, strict=True):
            assert flight.tree is not None, flight.error
            seen += check(flight.tree, some.episodes)
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.process_iter() if _of(p, str(tmp_path), "sleep(66.5)")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not engine.loop.busy
    engine.cache.tree.check()
    print(f"{n * len(flights)} episodes: {dict(seen)}")


def check(tree: Any, episodes: list[Any]) -> Counter[str]:
    """Check a group's tree; the kinds of its episodes."""
    leaves, kinds = tree.columns["episode"].tolist(), Counter[str]()
    for number, episode in enumerate(episodes):
        kind = KINDS[int(episode.id, 16) % len(KINDS)]
        kinds[kind] += 1
        mine = [leaf for leaf, of in enumerate(leaves) if of == number]
        if kind in FAILS:
            assert all(tree.status[leaf] == LeafStatus.FAILED for leaf in mine)
            assert FAILS[kind][1] in tree.meta["errors"][mine[0]], (kind, tree.meta["errors"][mine[0]])
            assert not any(leaf in tree.meta.get("given_rewards", {}) for leaf in mine)
        else:
            assert all(tree.meta["given_rewards"][leaf] == 0.5 for leaf in mine), (kind, tree.meta.get("errors"))
        answered = CALLS.get(kind, 1)
        given_up = HUNG_UP.get(kind, 0)  # one that is answered before its end is noticed is a call; unread, it is none
        assert answered <= len(episode.calls) <= answered + given_up - episode.aborted, kind
        record = EpisodeRecord(tuple(episode.calls), LeafStatus.STOP)
        wanted = sorted((token, logprob) for _, token, logprob, _ in sampled_tokens([record]))
        rows = [row for leaf in mine for row in tree.path_rows(leaf)[int(tree.leaf_prompt[leaf]) :]]
        trained = sorted((int(tree.token_id[r]), float(tree.behaviour_logprob[r])) for r in rows if tree.loss_mask[r])
        assert trained == wanted, kind
    failed = {name.removeprefix("failed_"): n for name, n in tree.meta["agent"].items() if name.startswith("failed_")}
    assert failed == {FAILS[kind][0]: kinds[kind] for kind in FAILS if kinds[kind]}
    kinds["aborted"] = tree.meta["counts"]["aborted_calls"]
    assert kinds["aborted"] == sum(episode.aborted for episode in episodes)
    assert kinds["aborted"] >= kinds["stream"]
    return kinds


def _of(process: psutil.Process, *parts: str) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return process.pid != os.getpid() and any(part in words for part in parts)


CLIENTS = 8
PATHS = [
    "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/reward", "/v1/models",
    "/../..", "/v1/%2e%2e/reward", "//", "/v1/chat/completions/x",
]  # fmt: skip
BODIES: list[bytes] = [b"", b"\xff", b"[" * 5000, b"null", b"1", b'{"messages":', json.dumps(CHAT).encode(), b"NaN"]
BODIES += [
    json.dumps({"messages": [{"role": role, "content": "x"}], "max_tokens": 1}).encode() for role in ("", "tool")
]
BODIES += [json.dumps({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 3}).encode()]
BODIES += [json.dumps({**CHAT, "stream": True}).encode(), json.dumps({**CHAT, "max_tokens": 10**30}).encode()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hostile_requests(tmp_path: Path, cases: int) -> None:
    """Bodies, paths and headers of any kind, with the key and without it, and lines that are no HTTP: each is refused,
    and an episode beside them goes on."""
    engine, count = make_engine(), max(160, 5 * cases)
    with group(engine, tmp_path, n=2, params={"max_new_tokens": 300}) as opened:
        before, files, own = threading.active_count(), psutil.Process().num_fds(), opened.episodes[1].key
        with ThreadPoolExecutor(CLIENTS) as clients:
            asked = [clients.submit(ask_anything, opened, count // CLIENTS, own, seed) for seed in range(CLIENTS)]
            seen = sum((client.result() for client in asked), Counter())
        deadline = time.monotonic() + 10
        while psutil.Process().num_fds() > files + 10:
            assert time.monotonic() < deadline, "connections are left open"
            time.sleep(0.05)
        assert threading.active_count() < before + 20
        assert not any(episode.open for episode in opened.episodes)
        with opened.client(1) as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        tree = opened.end()
    assert tree.columns["episode"].max() == 1
    assert tree.meta["agent"]["calls"] <= seen[200] + 1
    assert min(seen[400], seen[401], seen[404], seen[405]) > 0
    print(f"{count} requests: {dict(sorted(seen.items()))}")


def ask_anything(opened: Any, count: int, own: str, seed: int) -> Counter[int]:
    """Make ``count`` requests; how many had which status, 0 for lines that are no HTTP."""
    rng, seen = random.Random(seed), Counter[int]()
    port = int(opened.made._door.address().split(":")[2].split("/")[0])
    with httpx.Client(timeout=30) as client:
        for _ in range(count):
            if rng.random() < 0.05:
                with socket.create_connection(("127.0.0.1", port)) as line:
                    line.sendall(
                        bytes(rng.randrange(256) for _ in range(rng.randrange(200))) + b"\r\n" * rng.randrange(3)
                    )
                    if rng.random() < 0.5:
                        line.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
                seen[0] += 1
                continue
            key = rng.choice([None, "", "x", own, opened.episodes[0].key, "x:y:z", f"{own}:"])
            headers = {} if key is None else {"authorization": f"Bearer {key}".strip()}
            body, path = rng.choice(BODIES), rng.choice(PATHS[:6] if rng.random() < 0.8 else PATHS)
            body = body if rng.random() < 0.7 else bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
            method = rng.choice(["POST"] * 8 + ["GET", "PUT", "DELETE"])
            url = opened.made._door.address() + path
            answer = client.request(method, url, content=body, headers=headers)
            assert answer.status_code in (200, 307, 400, 401, 404, 405, 410, 429), (path, body, answer.text)
            assert "Traceback" not in answer.text
            right = key is not None and key.partition(":")[0] in [episode.key for episode in opened.episodes]
            if answer.status_code == 200:
                assert right, (key, path)
            seen[answer.status_code] += 1
    return seen


TALKER = """
import json, os, random, subprocess, sys, time, urllib.request

task = json.load(open(os.environ["ROLLTREE_TASK"]))
messages, number = list(task["messages"]), int(task["seed"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77.25)"], start_new_session=True)
for turn in range(1 + number % 3):
    body = json.dumps({"messages": messages, "max_tokens": 6, "ignore_eos": True}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    said = json.load(urllib.request.urlopen(asked))["choices"][0]
    messages += [{"role": "assistant", "content": said["message"]["content"]}, {"role": "user", "content": "on"}]
if number % 7 == 3:
    raise RuntimeError("it broke")
text = "".join(message["content"] for message in messages if message["role"] == "assistant")
json.dump((number + sum(map(ord, text))) % 3 / 2, open(os.environ["ROLLTREE_REWARD"], "w"))
"""
COUNTED = ("reward/mean", "rollout/sampled_tokens", "agent/calls", "agent/failed_exit", "rollout/failed")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_of_agents_is_killed_and_resumed(tmp_path: Path, cases: int) -> None:
    """At random moments, again and again: each step has the episodes that it has in a run that goes through."""
    kills, moment = max(2, cases // 200), random.Random(0)
    toml, _ = write(tmp_path)
    (tmp_path / "talker.py").write_text(TALKER)
    words = json.dumps([sys.executable, str(tmp_path / "talker.py")])
    toml.write_text(toml.read_text().replace('agent = "agent.py:solve"', f"command = {words}\nepisodes = 4"))
    steps = 2 * kills + 2

    def command(name: str, *more: str) -> list[str]:
        flags = [f"--output_dir={tmp_path / name}/runs", f"--trainer.steps={steps}", "--checkpoint.every=1"]
        return ["train", str(toml), *flags, "--reward.on_failure=drop", *more]

    def left() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _of(p, str(tmp_path / "talker.py"), "sleep(77.25)")]

    with forking() as server:
        assert Process(server, command("whole")).wait() == 0
        (log,) = (tmp_path / "whole").rglob("metrics.jsonl")
        log = tmp_path / "killed" / log.relative_to(tmp_path / "whole")
        made = 0
        for _ in range(kills):
            run = Process(server, command("killed", *(["--resume"] if made else [])))
            run.await_row(log, made + 1)
            time.sleep(moment.uniform(0, 1.0))
            if run.ended():
                break
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            made += 1
            deadline = time.monotonic() + 10
            while left():
                assert time.monotonic() < deadline, left()
                time.sleep(0.05)
        assert Process(server, command("killed", "--resume")).wait() == 0
    assert made >= max(2, kills // 2), "it has ended too soon"
    whole, killed = (counted(tmp_path / name) for name in ("whole", "killed"))
    assert killed == whole
    assert len(whole) == steps
    assert not left()
    print(f"{made} kills in {steps} steps: {whole}")


def counted(folder: Path) -> list[dict[str, Any]]:
    """Return the counts of a run's steps, with the episodes in their files."""
    (log,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    found = []
    for row in rows[1:]:
        table = pq.read_table(log.parent / "rollouts" / f"step_{row['step']:06d}.parquet").to_pylist()
        episodes = Counter((leaf["prompt_id"], leaf["episode"]) for leaf in table if leaf["answer"])
        assert set(episodes.values()) == {1}
        found.append({name: row.get(name) for name in COUNTED} | {"episodes": len(episodes)})
    return found
