"""The contract of Harbor's tasks with an engine of containers: a command that stands in for podman, and odd tasks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.programs import AgentCalls, EnvironmentTurns
from rolltree.engine.programs.harbor.setup import Setup, pool_of
from rolltree.engine.programs.harbor.task import Task
from rolltree.engine.programs.harbor.trial import Trial
from rolltree.engine.programs.servers.background import BACKGROUND
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.settings import Place
from rolltree.engine.tasks import read_problems

from ...support import serving
from ...support.harbor import SECRET, write_task
from .test_environment import WORDS, call, said, talk

STAND_IN = r"""#!/usr/bin/env python3
import json, os, sys
home = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
def note():
    with open(home + "/calls", "a") as file:
        file.write(json.dumps(words) + "\n")
def options(words, values=("--name", "--label", "--network", "--hostname", "--memory", "--memory-swap", "--cpus",
            "--workdir", "--env", "--volume", "--stop-timeout", "--user", "--ulimit")):
    found = {}
    while words and words[0].startswith("--"):
        name = words.pop(0)
        found.setdefault(name, []).append(words.pop(0) if name in values else "")
    return found
note()
verb = words.pop(0)
if verb == "image":
    sys.exit(0 if words[-1] == "here:1" else 1)
if verb in ("pull", "build"):
    sys.exit("Error: no network in here")
if verb == "ps":
    print("\n".join(name for name in os.listdir(home + "/running")))
if verb == "run":
    got = options(words)
    if "fails" in os.listdir(home):
        sys.exit("Error: OCI runtime says no")
    with open(home + "/running/" + got["--name"][0], "w") as file:
        json.dump(got, file)
if verb == "rm":
    for name in words[2:]:
        os.remove(home + "/running/" + name)
if verb == "inspect":
    print(json.load(open(home + "/running/" + words[-1]))["--label"][0].partition("=")[2])
if verb == "exec":
    got = options(words)
    name, *command = words
    volumes = json.load(open(home + "/running/" + name)).get("--volume", [])
    places = {place: here for here, place in (volume.split(":")[:2] for volume in volumes)}
    for place, here in places.items():
        command[-1] = command[-1].replace(place, here)
    variables = dict(each.split("=", 1) for each in got.get("--env", [])) | {"LOGS": places.get("/logs/verifier", "")}
    os.execvpe(command[0], command, os.environ | variables)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """The folder of a command ``podman`` that runs what is to run in containers on this machine."""
    home = tmp_path / "engine"
    (home / "running").mkdir(parents=True)
    (home / "podman").write_text(STAND_IN)
    (home / "podman").chmod(0o755)
    return home


def calls(home: Path, verb: str) -> list[list[str]]:
    """Return the words after ``verb`` of the calls of the command."""
    made = [json.loads(line) for line in (home / "calls").read_text().splitlines()]
    return [words[1:] for words in made if words[0] == verb]


def until(home: Path) -> None:
    for _ in range(200):
        if not list((home / "running").iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError("a container is left")


TOML = """
[environment]
docker_image = "here:1"
memory_mb = 512
cpus = 1.5
allow_internet = false
workdir = "/work"
env = { A = "1" }
[agent]
user = "me"
timeout_sec = 7
[verifier]
user = 0
env = { B = "2" }
"""


@pytest.mark.slow
def test_a_trial_asks_the_engine_for_what_the_task_says(stand_in: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path, toml=TOML, test='#!/bin/sh\necho "$B" > $LOGS/reward.txt')
    pool = pool_of(Setup.of({"engine": str(stand_in / "podman"), "engine_args": ["--ulimit", "nofile=9:9"]}))
    trial = Trial(pool, Task(task))
    trial.open()
    (run,) = calls(stand_in, "run")
    volumes = [run[at + 1] for at, word in enumerate(run) if word == "--volume"]
    tests = Path(volumes[0].partition(":")[0])
    assert [volume.partition(":")[2] for volume in volumes] == [
        "/tests:ro,z", "/logs/verifier:z", "/logs/agent:z", "/logs/artifacts:z"
    ]  # fmt: skip
    assert list(tests.iterdir()) == []
    assert SECRET not in "".join(path.read_text() for path in stand_in.rglob("*") if path.is_file())
    text = " ".join(run)
    for part in ("--detach", "--network none", "--memory 512m --memory-swap 512m", "--cpus 1.5", "--workdir /work",
                 "--env A=1", "--ulimit nofile=9:9 here:1 sh -c sleep infinity"):  # fmt: skip
        assert part in text
    output = trial.run("echo out; echo err >&2; exit 4", 5.0, 100)
    assert (output.code, output.text) == (4, "out\nerr\n")
    assert calls(stand_in, "exec")[-1][:4] == ["--user", "me", "--workdir", "/work"]
    assert trial.run("sleep 60", 0.3, 100).code is None
    assert trial.run("yes | head -c 5000", 5.0, 100).text.count("y") < 60
    assert trial.verify() == {"reward": 2.0}
    assert [words[0] for words in map(json.loads, (stand_in / "calls").read_text().splitlines())][-3:] == [
        "stop", "start", "exec"
    ]  # fmt: skip
    assert (tests / "hidden.txt").read_text().strip() == SECRET
    trial.close()
    until(stand_in)
    BACKGROUND.close()
    assert not tests.parent.parent.exists()


@pytest.mark.slow
def test_what_the_engine_refuses_is_told_and_nothing_is_left(stand_in: Path, tmp_path: Path) -> None:
    def check(toml: str) -> None:
        task = write_task(tmp_path / str(hash(toml)), toml=toml, environment__Dockerfile="FROM x")
        program = EnvironmentTurns("harbor", {"engine": str(stand_in / "podman")})
        program.check({"messages": [], "tools": [], "harbor": str(task)})

    check(TOML)
    with pytest.raises(
        UserError, match=r"has the image 'there:1', which is not here \(`.*podman pull` failed: Error: no net"
    ):
        check('[environment]\ndocker_image = "there:1"')
    with pytest.raises(
        UserError, match=r"has a Dockerfile that cannot be built here \(`.*podman build` failed: Error: no"
    ):
        check("")
    (stand_in / "fails").touch()
    with pytest.raises(
        UserError, match=r"has no container: `.*podman run` failed: Error: OCI runtime says no; mend it"
    ):
        check(TOML.replace("cpus = 1.5", "cpus = 2"))
    until(stand_in)
    BACKGROUND.close()


@pytest.mark.slow
def test_an_episode_by_the_stand_in(stand_in: Path, tmp_path: Path) -> None:
    """The shell's answers, a reward however the episode ends, and a failure of the tests as one of the episode."""
    engine = NativeEngine(serving.model(), WORDS, EngineConfig(kv_tokens=8192))
    test = f"#!/bin/sh\n[ -e {stand_in}/reward ] && cat {stand_in}/reward > $LOGS/reward.txt"
    task = write_task(tmp_path, toml=TOML.replace('workdir = "/work"', ""), test=test)
    program = EnvironmentTurns("harbor", {"engine": str(stand_in / "podman")}, max_turns=2)

    def play(*turns: str) -> TokenTree:
        script = lambda before: turns[min(before.count("<assistant>"), len(turns) - 1)]  # noqa: E731
        return talk(engine, script, program, tools=program.tools, row={"harbor": str(task)})

    tree = play(call("shell", command="echo hello; exit 3"), "Done")
    assert "<tool>hello\n(exit code 3)<end>" in said(tree)
    assert "wrote no reward" in tree.meta["errors"][0]
    (stand_in / "reward").write_text("0.5")
    says = call("shell", command="echo hello; exit 3")
    for turn, status in (("Done", LeafStatus.STOP), (says, LeafStatus.LENGTH), ("x" * 400, LeafStatus.LENGTH)):
        tree = play(turn)
        assert "errors" not in tree.meta
        assert list(tree.meta["given_rewards"].values()) == [0.5]
        assert list(tree.status) == [status]
    until(stand_in)
    program.close()


@pytest.mark.parametrize(("toml", "sentence"), [
    ("[environment", "cannot be read: "),
    ("[environment]\ndocker_image = 3", "environment.docker_image: Input should be a valid string"),
    ("[environment]\nmemory = 'much'", "memory = 'much' is no size"),
    ("[environment]\ncpus = 0", "environment.cpus"),
    ("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec"),
    ("[[steps]]\nname = 'a'", "has several steps, which a run does not have; make a task of each"),
    ("", "has neither environment.docker_image nor environment/Dockerfile"),
    ("[environment]\nos = 'Windows'", "has os = 'windows'"),
    ("[environment]\ngpus = 1", "asks for a GPU"),
    ("[[environment.mcp_servers]]\nname = 'a'", "mcp_servers"),
    ("[verifier]\nenvironment_mode = 'separate'", "verifies in another container"),
    ("[[verifier.collect]]\ncommand = 'a'", "verifies in another container"),
    ("[environment]\nenv = { A = '${NO_SUCH_VARIABLE_HERE}' }", "takes the variable 'NO_SUCH_VARIABLE_HERE'"),
    ("[environment]\nnetwork_mode = 'some'", "environment.network_mode"),
])  # fmt: skip
def test_a_task_that_asks_for_what_a_run_has_not_is_refused(tmp_path: Path, toml: str, sentence: str) -> None:
    files = {"environment__Dockerfile": "FROM here:1"} if toml else {}
    with pytest.raises(UserError) as refused:
        Task(write_task(tmp_path, toml=toml, **files))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("toml", "network"), [
    ("", True), ("[environment]\nallow_internet = false", False), ("[environment]\nallow_internet = true", True),
    ("[environment]\nnetwork_mode = 'no-network'\nallow_internet = true", False),
    ("[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'no-network'", False),
    ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org']", None),
    ("[agent]\nnetwork_mode = 'no-network'", None),
])  # fmt: skip
def test_networks(tmp_path: Path, toml: str, network: bool | None) -> None:
    task = Task(write_task(tmp_path, toml=toml, environment__Dockerfile="FROM here:1"))
    assert task.network(none=True) is False
    if network is None:
        with pytest.raises(UserError, match='give network = "none"'):
            task.network(none=False)
    else:
        assert task.network(none=False) is network


def test_a_folder_of_tasks_is_found_and_read(tmp_path: Path) -> None:
    for name in ("field/b", "field/a"):
        write_task(tmp_path / "set", name, toml=TOML + "[metadata]\nx = 1")
    read = read_problems(Place(str(tmp_path / "set"), "data.path"), "prompt", "answer")
    assert [problem.id for problem in read.rows] == ["set/field/a/0", "set/field/b/0"]
    assert [problem.text for problem in read.rows] == ["Do it."] * 2  # without the canary
    assert read.rows[0].entry["harbor"] == str(tmp_path / "set/field/a")
    before = read.rows.digest(pictures=False)
    (tmp_path / "set/field/b/instruction.md").write_text("Do more.")
    again = read_problems(Place(str(tmp_path / "set"), "data.path"), "prompt", "answer")
    assert again.rows.digest(pictures=False) != before
    (tmp_path / "empty").mkdir()
    for path, sentence in (("empty", "holds no task in Harbor's format"), ("none", "There is no folder")):
        with pytest.raises(UserError, match=sentence):
            read_problems(Place(str(tmp_path / path), "data.path", format="harbor"), "prompt", "answer")
    (tmp_path / "set/field/a/tests/test.sh").unlink()
    with pytest.raises(UserError, match=r"has no file 'tests/test\.sh'"):
        read_problems(Place(str(tmp_path / "set"), "data.path"), "prompt", "answer")


@pytest.mark.parametrize(("options", "sentence"), [
    ({"engine": ["no-such-engine"]}, "no program 'no-such-engine'"),
    ({"engine_args": "--rm"}, "give the words as a list"),
    ({"network": "host"}, 'give "task" or "none"'),
    ({"containers": 0}, "at least 1"),
    ({"keep_processes": 1}, "true or false"),
])  # fmt: skip
def test_options_of_containers_are_checked(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    context = {"messages": [], "tools": [], "harbor": str(write_task(tmp_path, toml=TOML))}
    with pytest.raises(UserError, match=sentence):
        EnvironmentTurns("harbor", options).check(context)
    with pytest.raises(UserError, match="needs prompts of tasks"):
        EnvironmentTurns("harbor").check({"messages": [], "tools": []})


def test_what_does_not_go_with_containers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="harbor cannot copy an episode"):
        EnvironmentTurns("harbor", ways=[2])
    for options in ({"agent": "a.py:f"}, {"command": ["sh"], "container": {"containers": 3}}):
        with pytest.raises(ValueError, match="runs a command in a container, one an episode"):
            AgentCalls(**{"container": {}, **options})
