"""Runs of agents from their TOML: trained, resumed, pulled out of other commands, and equal to the environment's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from rolltree.engine.app.assembly import run as build_run
from rolltree.engine.app.assembly import sampling as build_sampling
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.app.report import write_report
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.workers import InThreads

from ...support.conversations import write_conversations
from ...support.tiny import beside

GAME = """
from rolltree.engine.parts.resolve import import_object
import os, sys

sys.path.insert(0, {folder!r})
from parts import Guess


async def solve(task, client):
    game = Guess()
    game.reset(seed=int(task["seed"]))
    messages, reward = list(task["messages"]), 0.0
    for turn in range(2):
        answer = await client.chat.completions.create(model="m", messages=messages)
        said = answer.choices[0].message.content
        if answer.choices[0].finish_reason == "length":
            break
        heard, value, *_ = game.step(said)
        reward += value
        messages += [{{"role": "assistant", "content": said}}, {{"role": "user", "content": heard}}]
    return reward
"""


FAILS = """
async def solve(task, client):
    await client.chat.completions.create(model="m", messages=task["messages"])
    raise RuntimeError("a fault")
"""
SWALLOWS = """
import openai

def solve(task, client):
    try:
        client.chat.completions.create(model="m", messages=task["messages"], extra_body={"beam": 3})
    except openai.BadRequestError:
        return None
"""


def write(folder: Path) -> tuple[Path, list[str]]:
    """A run in which a game is played by an agent instead of the environment."""
    toml = write_conversations(folder)
    (folder / "agent.py").write_text(GAME.format(folder=str(folder)))
    agent = {"program": "agent", "program_options": {"agent": "agent.py:solve", "call_tokens": 12}}
    beside(toml, toml.stem, rollout=agent, algorithm={"advantage": "group_norm"})
    return toml, [f"--output_dir={folder / 'runs'}"]


def metrics(folder: Path) -> list[dict[str, Any]]:
    (file,) = (folder / "runs").rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_trains_on_episodes(tmp_path: Path) -> None:
    toml, flags = write(tmp_path)
    summary = build(load_config(toml, flags), console=Console()).run()
    rows = metrics(tmp_path)
    assert summary.steps == rows[-1]["step"] > 1
    for row in rows[1:]:
        assert row["agent/calls"] >= 1
        assert row["rollout/failed"] == 0
        assert row["rollout/aborted_calls"] == 0
        assert row["agent/tool_s"] > 0
        assert row["perf/idle/agents_start"] >= 0
        assert row["perf/idle/agents_tools"] >= 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rolltree-door")]
    (directory,) = (tmp_path / "runs").iterdir()
    page = write_report(directory).read_text()
    (trees,) = re.findall(r'<script type="application/json" id="trees">(.*?)</script>', page, re.DOTALL)
    for tree in json.loads(trees):
        assert sorted(line["episode"] for line in tree["episodes"]) == [0, 1, 2, 3]
        for line in tree["episodes"]:
            assert {part["kind"] for part in line["parts"]} >= {"prefill", "tool"}
            assert all(0 <= part["begin"] <= part["end"] <= line["seconds"] + 1e-6 for part in line["parts"])


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_engines_elsewhere_sample_the_same_episodes(
    engines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers in threads, as tests/engine/fleet has them."""
    lock, load_model = threading.Lock(), build_sampling.load_model

    def alone(*args: Any, **options: Any) -> Any:
        with lock:  # Transformers changes torch's functions while it loads a model
            return load_model(*args, **options)

    monkeypatch.setattr(build_sampling, "load_model", alone)
    had: dict[int, set[int]] = defaultdict(set)  # engines by the episode
    land = Fleet._land

    def watched(self: Fleet, engine: Any, flight: Any, future: Any) -> None:
        had[flight.job.owner].add(engine.index)
        land(self, engine, flight, future)

    monkeypatch.setattr(Fleet, "_land", watched)
    toml, _ = write(tmp_path)
    steps = "--trainer.steps=2"
    build(load_config(toml, [f"--output_dir={tmp_path / 'alone' / 'runs'}", steps]), console=Console()).run()
    monkeypatch.setattr(build_run, "make_workers", lambda config: InThreads())
    given = [f"--output_dir={tmp_path / 'fleet' / 'runs'}", f"--rollout.engines={engines}", steps]
    build(load_config(toml, given), console=Console()).run()
    for mine, wanted in zip(metrics(tmp_path / "fleet")[1:], metrics(tmp_path / "alone")[1:], strict=True):
        for name in ("reward/mean", "rollout/sampled_tokens", "agent/calls", "rollout/failed"):
            assert mine[name] == pytest.approx(wanted[name], rel=1e-6), name
    assert {len(some) for episode, some in had.items() if episode} == {1}, "an episode stays at one engine"
    assert set().union(*had.values()) == set(range(engines))


def test_a_first_step_without_an_episode_ends_the_run(tmp_path: Path, capsys: Any) -> None:
    """With the reason for which the first call was refused, which the agent has swallowed."""
    toml, flags = write(tmp_path)
    (tmp_path / "agent.py").write_text(SWALLOWS)
    assert main(["train", str(toml), *flags]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "All responses could not be sampled in the first step" in said
    assert "the first was refused: `beam`: Extra inputs are not permitted" in said


@pytest.mark.check
def test_episodes_that_sample_and_then_fail_do_not_end_a_run(tmp_path: Path, capsys: Any) -> None:
    toml, flags = write(tmp_path)
    (tmp_path / "agent.py").write_text(FAILS)
    assert main(["train", str(toml), *flags, "--trainer.max_bad_steps=9", "--trainer.steps=2"]) == 0
    assert "RuntimeError: a fault" in " ".join(capsys.readouterr().out.split())


def test_an_episode_is_printed(tmp_path: Path, capsys: Any) -> None:
    toml, _ = write(tmp_path)
    shown = tmp_path / "shown.parquet"
    assert main(["rollout", str(toml), "--prompts", "1", "--out", str(shown)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"reward -?\d.*, 4 episodes of [4-8] calls, \d+ leaves, ", printed)
    assert "<user>" in printed
    table = pq.read_table(shown).to_pylist()
    calls = [row["calls"] for row in table if row["answer"]]
    assert len(calls) == 4
    for of_episode in calls:
        assert [call["number"] for call in of_episode] == list(range(1, len(of_episode) + 1))
        times = [call[name] for call in of_episode for name in ("arrived", "begun", "first", "ended")]
        assert times == sorted(times)
    assert all(row["episode_s"] >= row["calls"][-1]["ended"] for row in table if row["answer"])


@pytest.mark.slow
def test_episodes_span_updates(tmp_path: Path) -> None:
    """At staleness 1, with sampling beside the updates, and a checkpoint in which episodes are open."""
    toml, flags = write(tmp_path)
    flags += ["--loop.staleness=1", "--checkpoint.every=1", "--trainer.steps=3"]
    build(load_config(toml, flags), console=Console()).run()
    made = build(load_config(toml, [*flags, "--trainer.steps=5"]), console=Console(), resume=True)
    made.run()
    rows = metrics(tmp_path)
    assert rows[-1]["step"] == 5
    assert all(row["rollout/failed"] == 0 for row in rows[1:])


def test_without_the_servers_packages_or_an_agent_the_run_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    toml, flags = write(tmp_path)
    for option, said in (
        ('agent="nowhere.py:solve"', "There is no file"),
        (f'agent="{tmp_path}/agent.py:nobody"', "defines no function or class 'nobody'"),
        ("at_once=0", ">= 1"),
        ("speed=1", "speed"),
    ):
        assert main(["train", str(toml), *flags, f"--rollout.program_options.{option}"]) == 2
        assert said in capsys.readouterr().err, option


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_agent_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle of episodes of commands; the resumed run begins these episodes anew."""
    toml, flags = write(tmp_path)
    (tmp_path / "command.py").write_text(
        "import json, os, subprocess, sys, time, urllib.request\n"
        "task = json.load(open(os.environ['ROLLTREE_TASK']))\n"
        "body = json.dumps({'messages': task['messages']}).encode()\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "asked = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, key)\n"
        "json.load(urllib.request.urlopen(asked))\n"
        "if not os.path.exists(sys.argv[1]):\n"
        "    words = [sys.executable, '-c', 'import time; time.sleep(77.25)']\n"
        "    subprocess.Popen(words, start_new_session=True)\n"
        "    time.sleep(99)\n"
        "json.dump(1.0, open(os.environ['ROLLTREE_REWARD'], 'w'))\n"
    )
    words = json.dumps([sys.executable, str(tmp_path / "command.py"), str(tmp_path / "go")])
    text = toml.read_text().replace('agent = "agent.py:solve"', f"command = {words}")
    toml.write_text(text)
    command = [sys.executable, "-m", "rolltree.engine.app.cli", "train", str(toml), *flags]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: left(tmp_path), process, tmp_path / "log")
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not left(tmp_path))
    finally:
        process.kill()
    (tmp_path / "go").touch()
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=200)
    assert metrics(tmp_path)[-1]["agent/calls"] == 1
    assert not left(tmp_path)


def until(true: Any, process: Any = None, log: Path | None = None) -> None:
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline, log and log.read_text()
        assert process is None or process.poll() is None, log and log.read_text()
        time.sleep(0.1)


def left(folder: Path) -> list[psutil.Process]:
    """Agents of the run and their children."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if process.pid != os.getpid() and (f"{folder / 'command.py'}" in words or "sleep(77.25)" in words):
            found.append(process)
    return [p for p in found if "rolltree.engine.app.cli" not in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()  # type: ignore[no-any-return]
    except psutil.Error:
        return []


def test_further_policies_play_no_role_of_an_agent(tmp_path: Path, capsys: Any) -> None:
    toml, flags = write(tmp_path)
    beside(toml, toml.stem, rollout={"program_options": {"agent": "agent.py:solve", "roles": ["planner"]}})
    toml.write_text(toml.read_text() + f'\n[models.planner]\npath = "{tmp_path / "model"}"\n')
    assert main(["train", str(toml), *flags]) == 2
    assert "`models.planner` plays a role of a program" in capsys.readouterr().err
