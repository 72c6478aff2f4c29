"""Episodes on servers of OpenEnv: what is offered, said, rewarded and ended, and servers that misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import EnvironmentTurns
from rolltree.engine.record.failures import kind, unsampled
from rolltree.engine.rollout import EngineConfig, NativeEngine

from ...support import serving
from ...support.conversations import write_conversations
from ...support.tiny import ROOT, beside
from .test_environment import WORDS, call, said, talk

pytest.importorskip("openenv", reason="OpenEnv is not installed: pip install rolltree[openenv]")

from rolltree.engine.programs.servers.openenv import find_server
from rolltree.engine.programs.servers.process import Command
from rolltree.engine.tasks.openenv import ServedPrompts

COMMAND = [sys.executable, str(ROOT / "tests/support/openenv_server.py"), "{port}"]


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(serving.model(), WORDS, EngineConfig(kv_tokens=8192))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    own = Command(COMMAND)  # of no run, whose end would end it
    yield own.address()
    own.close()


def program(address: str, **options: Any) -> EnvironmentTurns:
    options = {"max_turns": 8} | options
    return EnvironmentTurns("openenv", {"url": address, "observation": "heard"}, **options)


def live(server: str, wanted: int) -> int:
    """Return the number of episodes on the server, once it is the wanted one or 5 s have passed."""
    for _ in range(100):
        with urllib.request.urlopen(f"{server}/live") as answer:
            found = int(answer.read())
        if found == wanted:
            break
        time.sleep(0.05)
    return found


def rewards(tree: TokenTree) -> list[float]:
    return [float(value) for value in tree.meta["given_rewards"].values()]


def one_after_another(*turns: str) -> Callable[[str], str]:
    return lambda before: turns[min(before.count("<assistant>"), len(turns) - 1)]


def test_a_text_is_the_action_and_the_server_rewards_and_ends(engine, server) -> None:
    tree = talk(engine, one_after_another("a", "b", "c"), program(f"{server}/words"), row={"seed": 7})
    between = "<end>\n<user>{}<end>\n<assistant>"
    assert said(tree) == f"a{between.format('a 1 7')}b{between.format('b 2 7')}c<end>"
    assert rewards(tree) == [0.25 + 0.5 + 0.75]
    assert list(tree.status) == [LeafStatus.STOP]
    assert live(server, 0) == 0


def test_a_turn_that_calls_a_function_is_no_action(engine, server) -> None:
    words = program(f"{server}/words")
    script = one_after_another(call("calculator", expression="6 * 7"), "a", "end")
    tree = talk(engine, script, words, tools=["calculator", *words.tools], max_new_tokens=400)
    assert "<tool>42<end>" in said(tree)
    assert "<user>a 1 0<end>" in said(tree), "the first action is the second turn"
    assert rewards(tree) == [0.25 + 0.5]


def test_a_server_that_wants_a_token(engine, server, monkeypatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "hidden")
    options = {"url": f"{server}/guarded", "headers": {"Authorization": "Bearer ${OPENENV_TOKEN}"}}
    guarded = EnvironmentTurns("openenv", options | {"observation": "heard"})
    assert list(talk(engine, one_after_another("end"), guarded, tools=guarded.tools).status) == [LeafStatus.STOP]
    assert ServedPrompts(**options, observation="heard").next(1)[0]["prompt"] == "word 0"
    with pytest.raises(UserError, match=r"cannot be asked .*401"):
        ServedPrompts(url=options["url"], observation="heard").next(1)
    monkeypatch.delenv("OPENENV_TOKEN")
    with pytest.raises(UserError, match="variable OPENENV_TOKEN, which is not set"):
        ServedPrompts(**options)
    with pytest.raises(UserError, match="`headers` of openenv goes with `url`"):
        find_server(None, ["python"], {"A": "b"})


def test_rewards_go_to_their_turns(engine, server) -> None:
    tree = talk(engine, one_after_another("a", "b", "end"), program(f"{server}/words", turn_rewards=True))
    assert rewards(tree) == [0.75]
    assert tree.token_reward[np.isfinite(tree.token_reward)].tolist() == [0.25, 0.5]


@pytest.mark.parametrize(("turns", "status", "reward"), [
    (["a", "cut"], LeafStatus.LENGTH, 0.75), (["end"], LeafStatus.STOP, 0.25), (["a", "b"], LeafStatus.LENGTH, 0.75),
])  # fmt: skip
def test_a_truncated_episode_is_told_from_one_that_has_ended(engine, server, turns, status, reward) -> None:
    ended = program(f"{server}/words", max_turns=2)
    tree = talk(engine, one_after_another(*turns), ended)
    assert list(tree.status) == [status]
    assert rewards(tree) == [reward]
    assert live(server, 0) == 0  # also where the last turn was ours


def test_an_action_with_fields_is_a_tool(engine, server) -> None:
    moves = program(f"{server}/moves", max_turns=3)
    (offered,) = find_server(f"{server}/moves", None).offer().tools
    assert offered["function"]["description"] == "Moves a piece."
    parameters = offered["function"]["parameters"]
    assert set(parameters["properties"]) == {"piece", "to", "hard"}
    assert parameters["properties"]["to"]["properties"]["row"]["type"] == "integer"
    assert "$" not in json.dumps(parameters)
    right = call("step", piece="king", to={"row": 2, "column": 1})
    wrong = call("step", piece="k", to=1)
    tree = talk(engine, one_after_another(right, wrong + call("calculator", expression="2"), "Done"), moves,
                tools=["calculator", *moves.tools], max_new_tokens=400)  # fmt: skip
    assert "<tool>king 2 False<end>" in said(tree)
    assert "<tool>error: 1 is not of type 'object'<end>\n<tool>2<end>" in said(tree)
    assert rewards(tree) == [1.0]
    assert list(tree.status) == [LeafStatus.STOP]


def test_listed_tools_are_offered_and_called(engine, server) -> None:
    tools = EnvironmentTurns("openenv", {"url": f"{server}/tools"})
    script = one_after_another(call("add", number=2) + call("add", number=3), call("add", number=-1), "5")
    tree = talk(engine, script, tools, n=3, tools=tools.tools)
    for leaf in range(3):  # each in a session of its own
        assert "<tool>2<end>\n<tool>5<end>" in said(tree, leaf)
        assert "<tool>error: " in said(tree, leaf)
        assert "only more" in said(tree, leaf)
    assert "given_rewards" not in tree.meta


@pytest.mark.parametrize(("place", "turns", "reason", "sort"), [
    ("words", ["raise"], "failed: Server error: no such word (code: EXECUTION_ERROR)", "raised"),
    ("words", ["sleep 3"], "", "timeout"),
    ("bad", ["no JSON"], "answered no result (JSONDecodeError: ", "raised"),
    ("bad", ["[]"], "answered no result (AttributeError: ", "raised"),
    ("bad", ['{"type": "observation", "data": {"observation": "text"}}'], "which is no observation", "raised"),
    ("bad", ['{"type": "observation", "data": {"observation": {}, "reward": "much"}}'], "'much'", "raised"),
    ("bad", ['{"type": "observation", "data": {"observation": {}, "reward": NaN}}'], "reward 'nan'", "raised"),
    ("bad", ["leave"], "ended the connection (ConnectionClosed", "raised"),
])  # fmt: skip
def test_a_server_that_misbehaves_fails_the_episode_alone(engine, server, place, turns, reason, sort) -> None:
    tree = talk(engine, one_after_another(*turns), program(f"{server}/{place}", timeout_s=0.5))
    assert list(tree.status) == [LeafStatus.FAILED]
    (why,) = unsampled(tree).values()
    assert reason in why, why
    assert kind(why) == sort
    assert place == "bad" or sort == "timeout" or f"`{server}/{place}`" in why
    assert live(server, 0) == 0
    assert list(talk(engine, one_after_another("end"), program(f"{server}/words")).status) == [LeafStatus.STOP]


def test_a_long_observation_that_does_not_fit_ends_the_response(engine, server) -> None:
    tree = talk(engine, one_after_another("long 1000000"), program(f"{server}/words"))
    assert list(tree.status) == [LeafStatus.LENGTH]


def test_episodes_wait_for_a_free_session(engine, server) -> None:
    single = program(f"{server}/single", timeout_s=5.0)
    tree = talk(engine, one_after_another("sleep 0.1", "end"), single, n=9)
    assert list(tree.status) == [LeafStatus.STOP] * 9
    assert not unsampled(tree)


@pytest.mark.check
def test_a_killed_server_fails_its_episodes_and_the_next_start_it_again(engine) -> None:
    own = EnvironmentTurns("openenv", {"command": [*COMMAND, "own"], "observation": "heard"}, timeout_s=60)
    place = find_server(None, [*COMMAND, "own"])
    with pytest.MonkeyPatch.context() as patch:
        address = type(place).address
        patch.setattr(type(place), "address", lambda self: f"{address(self)}/words")
        tree = talk(engine, one_after_another("a", "die"), own, n=2)
        assert list(tree.status) == [LeafStatus.FAILED] * 2
        assert all("ended the connection" in why for why in unsampled(tree).values())
        assert list(talk(engine, one_after_another("end"), own).status) == [LeafStatus.STOP]
    own.close()


@pytest.mark.parametrize(("options", "reason"), [
    ({}, "one of the options"), ({"url": "http://a", "command": ["b"]}, "one of the options"),
    ({"url": "ftp://a"}, "give an address"), ({"command": "python server.py"}, "as a list"),
    ({"url": "http://127.0.0.1:9"}, "cannot be asked at http://127.0.0.1:9/schema"),
    ({"command": [sys.executable, "-c", "print('no port'); raise SystemExit(3)"]}, "ended with status 3 .* no port"),
    ({"command": ["no-such-program"]}, "No such file"),
])  # fmt: skip
def test_what_cannot_be_reached_is_told(options, reason) -> None:
    with pytest.raises(UserError, match=reason):
        find_server(options.get("url"), options.get("command")).offer()


def test_what_an_episode_needs_is_told(engine, server) -> None:
    with pytest.raises(ValueError, match="cannot copy an episode"):
        program(f"{server}/words", ways=[2])
    lacking = EnvironmentTurns("openenv", {"url": f"{server}/words", "reset": ["level"]})
    with pytest.raises(UserError, match="the column 'level', which the prompt lacks"):
        talk(engine, one_after_another("a"), lacking)
    unknown = EnvironmentTurns("openenv", {"url": f"{server}/words", "observation": "seen"})
    assert "'seen', and the server's observation has" in unsampled(talk(engine, one_after_another("a"), unknown))[0]
    ended = talk(engine, one_after_another("a"), program(f"{server}/words"), row={"seed": 99})
    assert "ended the episode at its reset" in unsampled(ended)[0]
    shown = talk(
        engine, one_after_another("a"), program(f"{server}/words"), row={"seed": 1, "openenv_observation": "x"}
    )
    assert "do not follow `seed`" in unsampled(shown)[0]


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory, server: str) -> Path:
    folder = tmp_path_factory.mktemp("openenv")
    served = {"url": f"{server}/words", "observation": "heard"}
    first = write_conversations(folder)
    return beside(
        first, "served", data={"source": "openenv", "source_options": served},
        rollout={"program_options": {"environment": "openenv", "environment_options": served, "max_turns": 2,
                                     "turn_tokens": 12}},
        trainer={"steps": 2},
    )  # fmt: skip


def test_a_run_trains_on_what_the_server_rewards(toml: Path, tmp_path: Path, server: str) -> None:
    config = load_config(toml, [f"--output_dir={tmp_path}"])
    summary = build(config, console=Console()).run()
    assert summary.steps == 2
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["rollout/failed"] == 0 for row in rows[1:])
    assert all(np.isfinite(row["reward/mean"]) for row in rows[1:])
    assert live(server, 0) == 0
    assert (
        build(load_config(toml, [f"--output_dir={tmp_path}/b"]), console=Console()).source.peek(1)[0].problem
        == "word 0"
    )


def alive(mark: str) -> list[int]:
    """Return the processes whose command line has ``mark``."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in line.read_bytes():
                found.append(int(line.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.check
@pytest.mark.parametrize("how", ["close", "kill"])
def test_no_process_is_left(how: str) -> None:
    mark = f"mark-{how}-{os.getpid()}"
    script = (
        "import sys, time\nfrom rolltree.engine.programs.servers.openenv import find_server\n"
        f"print(find_server(None, {[*COMMAND, mark]!r}).address(), flush=True)\nsys.stdin.read()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdin is not None
    assert run.stdout is not None
    assert re.match("http://127.0.0.1:", run.stdout.readline())
    assert len(alive(mark)) >= 2
    if how == "kill":
        run.send_signal(signal.SIGKILL)
    run.stdin.close()
    run.wait()
    for _ in range(100):
        if not (left := alive(mark)):
            break
        time.sleep(0.1)
    assert left == []
