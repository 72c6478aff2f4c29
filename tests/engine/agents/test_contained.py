"""Commands of agents in the containers of Harbor's tasks: they reach the run and nothing else, and the tests reward."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import AgentCalls
from rolltree.engine.programs.servers.background import BACKGROUND
from rolltree.engine.rollout import NativeEngine

from ...support.agents import job, run
from ...support.harbor import ARGS, ENGINE, IMAGE, OPTIONS, containers, write_task

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("podman")]

ASKS = (
    "ask() { wget -q -O - --header \"Authorization: Bearer $OPENAI_API_KEY\" --header 'Content-Type: application/json' "
    '--post-data "$1" $OPENAI_BASE_URL/chat/completions; }\n'
    'call() { ask "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}], \\"max_tokens\\": 6}"; }\n'
)


def play(
    engine: NativeEngine, task: Path, script: str, n: int = 1, container: dict[str, Any] | None = None, **options: Any
) -> TokenTree:
    """Run the group of a task whose agent is a script of a shell."""
    asked = job(engine, n=n)
    asked = replace(asked, context={**asked.context, "harbor": str(task)})
    given = OPTIONS | (container or {})
    tree = run(engine, asked, command=["sh", "-c", ASKS + script], container=given, **options)
    assert not containers()
    return tree


def rewards(tree: TokenTree) -> list[float]:
    assert "errors" not in tree.meta, tree.meta["errors"]
    return [float(value) for value in tree.meta["given_rewards"].values()]


def test_agents_work_in_the_container_and_the_tests_reward_them(engine, tmp_path) -> None:
    task = write_task(tmp_path, "sort-words")
    script = 'call "$(pwd) $(hostname) $HOME" > a; sort -o words.txt words.txt; call "$(cat words.txt | tr "\\n" " ")"'
    tree = play(engine, task, script, n=3)
    assert set(rewards(tree)) == {1.0}
    words: Any = engine.tokenizer
    first = tree.path_rows(0)[: int(tree.leaf_prompt[0])]
    assert "/app task" in words.decode(tree.token_id[first])
    assert tree.logical_tokens / tree.num_tokens > 1.5, "episodes share what they say of where they run"
    assert rewards(play(engine, task, "call hello")) == [0.0]


def test_an_agent_reaches_the_runs_server_and_nothing_else(engine, tmp_path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        script = f"""
{{ ls /sys/class/net; cat /episode/task.json; ls /tests
for address in 127.0.0.1:{port} 10.0.2.2:{port} {socket.gethostbyname(socket.gethostname())}:{port} 1.1.1.1:80
do nc -w 1 ${{address%:*}} ${{address#*:}} < /dev/null && echo reached $address; done
nc -w 1 127.0.0.1 18080 < /dev/null && echo at the door
wget -q -O - $OPENAI_BASE_URL/models || echo refused without a key
wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/models; }} > /app/told 2>&1
call done
"""
        test = "#!/bin/sh\ncat /app/told; echo 1 > /logs/verifier/reward.txt; cp /app/told /logs/artifacts/"
        told = tmp_path / "told"
        told.mkdir()
        given = {"engine_args": [*ARGS, "--volume", f"{told}:/keep"]}
        task = write_task(tmp_path, test=test + "; cp /app/told /keep/told")
        assert rewards(play(engine, task, script, container=given)) == [1.0]
        text = (told / "told").read_text()
        assert text.startswith("lo\n{")
        assert "reached" not in text
        assert "harbor" not in text, "the task's folder is not told"
        assert "at the door" in text
        assert "refused without a key" in text
        assert '"object":"list"' in text
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


@pytest.mark.parametrize(("script", "toml", "options", "reason", "reward"), [
    ("call a; exit 3", "", {}, "sh ended with exit code 3", None),
    ("call a; call b || exit 1", "", {"calls": 1}, None, 1.0),
    ("call a; sleep 60", "[agent]\ntimeout_sec = 1.5", {}, None, 1.0),
    ("call a; sleep 60", "", {"timeout_s": 6.0}, "did not return within 6 s", None),
    ("true", "", {}, "the agent made no call", None),
    ('call a; wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --post-data 7 $ROLLTREE_URL/reward', "", {},
     None, 1.0),
])  # fmt: skip
def test_ends_of_agents(engine, tmp_path, script, toml, options, reason, reward) -> None:
    limits = f'[environment]\ndocker_image = "{IMAGE}"\nnetwork_mode = "no-network"\n{toml}'
    task = write_task(tmp_path, toml=limits, test="#!/bin/sh\necho 1 > /logs/verifier/reward.txt")
    tree = play(engine, task, script, **options)
    if reason is None:
        assert rewards(tree) == [reward]
    else:
        assert reason in tree.meta["errors"][0]
        assert list(tree.status) == [LeafStatus.FAILED]


def test_what_cannot_be_started_is_refused_before_the_run(tmp_path) -> None:
    row = {"messages": [], "harbor": str(write_task(tmp_path))}

    def check(command: str = "sh", of: dict[str, Any] | None = None, **options: Any) -> None:
        AgentCalls(command=[command], container=OPTIONS | options).check(of or row)

    check()
    for sentence, arguments in {
        "no program 'no-such-agent'": {"command": "no-such-agent"},
        "needs prompts of tasks": {"of": {"messages": []}},
        "There is no program 'no-such-engine'": {"engine": "no-such-engine"},
        "unknown flag: --no-such-flag": {"engine_args": ["--no-such-flag"]},
        "have no option 'memory'": {"memory": "2G"},
    }.items():
        with pytest.raises(UserError, match=sentence):
            check(**arguments)
    broken = "FROM docker.io/library/no-such:1\nRUN apt-get update"
    for sentence, files in {
        "has a Dockerfile that cannot be built here": {"toml": "", "environment__Dockerfile": broken},
        "has the image 'localhost/no-such:1', which is not here": {
            "toml": "[environment]\ndocker_image = 'localhost/no-such:1'"
        },
        "no matching entries in passwd file|unable to find user": {
            "toml": f"[environment]\ndocker_image = '{IMAGE}'\n[agent]\nuser = 'nobody-here'"
        },
    }.items():
        task = write_task(tmp_path / str(len(sentence)), **files)
        with pytest.raises(UserError, match=sentence):
            check(of={"messages": [], "harbor": str(task)})
    assert not containers()


KILLED = """
import sys, threading, time
from pathlib import Path
from rolltree.engine.programs.harbor.setup import Setup, pool_of
from rolltree.engine.programs.harbor.task import Task
from rolltree.engine.programs.harbor.trial import Trial
pool = pool_of(Setup.of({"engine": sys.argv[2].split(), "engine_args": sys.argv[3].split()}))
trials = [Trial(pool, Task(Path(sys.argv[1]))) for _ in range(6)]
for trial in trials:
    trial.ahead()
trials[0].open()
print(pool.engine.owned.folder, flush=True)
trials[0].run("sleep 60", 60.0, 100)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Callable[..., Path]:
    """Kill a process while containers are starting and a command runs; return the folder that it had."""
    task = write_task(tmp_path)

    def kill(*, reaper: bool) -> Path:
        words = [sys.executable, "-c", KILLED, str(task), " ".join(ENGINE), " ".join(ARGS)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        assert containers()
        if reaper:
            found = subprocess.run(["pgrep", "-f", f"owned.py {folder} "], capture_output=True, text=True, check=True)
            os.kill(int(found.stdout), signal.SIGKILL)
        process.kill()
        process.wait()
        return folder

    return kill


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_run_leaves_no_container_and_no_folder(killed) -> None:
    folder = killed(reaper=False)
    until(lambda: not containers() and not folder.exists())


def test_the_next_run_removes_what_a_killed_machine_has_left_and_nothing_else(engine, tmp_path, killed) -> None:
    BACKGROUND.close()  # this process has then no containers, as when it began
    folder = killed(reaper=True)
    time.sleep(3)  # for the clients that were starting containers
    left = containers()
    assert left
    other = subprocess.run(
        [*ENGINE, "run", "-d", "--label", "rolltree.owner=another-host:/tmp/x", "--network", "none", *ARGS, IMAGE,
         "sleep", "600"], capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    try:
        asked = replace(job(engine, n=1), context={**job(engine).context, "harbor": str(write_task(tmp_path / "next"))})
        tree = run(engine, asked, command=["sh", "-c", ASKS + "call a"], container=OPTIONS)
        assert rewards(tree) == [1.0]
        assert [name for name in containers() if not other.startswith(name) and not name.startswith(other)] == []
        assert not folder.exists()
        assert containers()
    finally:
        subprocess.run([*ENGINE, "rm", "-f", other], capture_output=True, check=True)
