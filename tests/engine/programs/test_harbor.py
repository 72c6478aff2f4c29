"""Tasks in Harbor's format in containers of podman: commands, tests, rewards, limits, what is hidden, what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from rolltree.engine import LeafStatus
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import EnvironmentTurns
from rolltree.engine.programs.servers.background import BACKGROUND
from rolltree.engine.rollout import EngineConfig, NativeEngine

from ...support import serving
from ...support.harbor import IMAGE, OPTIONS, SECRET, TASKS, containers, write_task
from ...support.tiny import ROOT
from .test_environment import WORDS, call, said, talk

pytestmark = pytest.mark.usefixtures("podman")


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    config = serving.model().config
    config.max_position_embeddings = 8192
    yield NativeEngine(Qwen3ForCausalLM(config).eval(), WORDS, EngineConfig(kv_tokens=32768))
    BACKGROUND.close()
    assert not containers()


def shell(*commands: str) -> str:
    return "".join(call("shell", command=command) for command in commands)


def one_after_another(*turns: str) -> Callable[[str], str]:
    return lambda before: turns[min(before.count("<assistant>"), len(turns) - 1)]


def play(engine: NativeEngine, task: Path, *turns: str, n: int = 1, **options: Any) -> TokenTree:
    """Play an episode: the model says ``turns``, one after the other."""
    of_program = {name: options.pop(name) for name in ("max_turns", "turn_tokens", "timeout_s") if name in options}
    program = EnvironmentTurns("harbor", OPTIONS | options, **{"max_turns": 6, **of_program})
    row = {"harbor": str(task)}
    program.check({"messages": [], "tools": program.tools, **row})
    return talk(engine, one_after_another(*turns), program, n=n, tools=program.tools, row=row, max_new_tokens=3000)


def rewards(tree: TokenTree) -> list[float]:
    assert "errors" not in tree.meta, tree.meta["errors"]
    return [float(value) for value in tree.meta["given_rewards"].values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_solved_by_its_solution_and_not_without(engine, tmp_path, name) -> None:
    task = write_task(tmp_path, name)
    tree = play(engine, task, shell(TASKS[name].solution), "Done")
    assert rewards(tree) == [1.0], said(tree)
    assert rewards(play(engine, task, shell("ls"), "Done")) == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted((ROOT / "examples" / "harbor_tasks").iterdir()), ids=lambda task: task.name)
def test_an_example_is_solved_by_its_solution_and_not_without(engine, task) -> None:
    solution = (task / "solution" / "solve.sh").read_text().splitlines()[-1]
    assert rewards(play(engine, task, shell(solution), "Done")) == [1.0]
    assert rewards(play(engine, task, shell("ls"), "Done")) == [0.0]


LOOKS = (
    f"grep -rl {SECRET[:6]}'{SECRET[6:]}' / --exclude-dir=proc --exclude-dir=sys 2> /dev/null",
    "ls -A /tests /solution /logs/verifier /oracle; find / -name solve.sh -o -name hidden.txt",
    f"for p in /proc/[0-9]*; do grep -l {SECRET[:6]}'{SECRET[6:]}' $p/environ $p/cmdline; ls $p/root/tests $p/fd; done",
    "for f in $(cut -d' ' -f2 /proc/mounts); do ls -A $f | grep -x -e tests -e hidden.txt -e solution; done",
    "echo x > /tests/test.sh; rm -rf /tests; ln -s /etc /tests; mount --bind /app /tests; ls -A /tests",
)
"""An agent that looks for the tests: the text (never whole in its commands), files, processes, mounts, a trap."""
WATCHES = (
    "cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json; ln -s /etc l; "
    "(while true; do cat /tests/* >> /app/seen; echo 1 > reward.txt; sleep 0.02; done) > /dev/null 2>&1 &"
)
UNSEEN = "#!/bin/sh\ncd /logs/verifier; sleep 0.3\n[ -s /app/seen ] && exit\n[ -e l ] || echo 0.25 > reward.txt\n"


@pytest.mark.check
def test_an_agent_finds_no_test_and_no_solution(engine, tmp_path) -> None:
    task = write_task(tmp_path)
    tree = play(engine, task, shell(*LOOKS), "Done", timeout_s=120.0)
    assert rewards(tree) == [1.0]
    answers = said(tree).partition("<tool>")[2]
    assert SECRET not in answers
    assert "hidden.txt" not in answers
    assert "solve.sh" not in answers
    assert "Read-only file system" in answers


@pytest.mark.slow
def test_what_an_agent_leaves_running_sees_no_test_and_writes_no_reward(engine, tmp_path) -> None:
    task = write_task(tmp_path, test=UNSEEN)
    assert rewards(play(engine, task, shell(WATCHES), "Done")) == [0.25]
    goes_on = play(engine, task, shell(WATCHES), "Done", keep_processes=True)
    assert rewards(goes_on) == [1.0]  # which is why it is not the default


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "options", "status"), [
    ([shell("echo a > b"), "Done"], {}, LeafStatus.STOP),
    ([shell("echo a > b")], {"max_turns": 2}, LeafStatus.LENGTH),
    ([shell("echo a > b"), "x" * 400], {"turn_tokens": 300}, LeafStatus.LENGTH),
    ([shell("echo a > b"), "x" * 9000], {}, LeafStatus.LENGTH),
    ([shell("echo a > b; sleep 60"), "Done"], {"toml": "[agent]\ntimeout_sec = 1.5"}, LeafStatus.LENGTH),
])  # fmt: skip
def test_the_tests_run_however_an_episode_ends(engine, tmp_path, turns, options, status) -> None:
    test = "#!/bin/sh\ncd /logs/verifier; [ -e /app/b ] && echo 0.5 > reward.txt || echo 0 > reward.txt"
    toml = f'[environment]\ndocker_image = "{IMAGE}"\nallow_internet = false\n{options.pop("toml", "")}'
    tree = play(engine, write_task(tmp_path, toml=toml, test=test), *turns, **options)
    assert rewards(tree) == [0.5]
    assert list(tree.status) == [status]


@pytest.mark.slow
def test_commands_are_limited_and_answered(engine, tmp_path) -> None:
    task = write_task(tmp_path)
    commands = {
        "sleep 30": "(killed after ",
        "exit 3": "(exit code 3)",
        "echo out; echo err >&2; false": "out\nerr\n(exit code 1)",
        "yes x | head -c 1000000": "bytes left out)",
        "dd if=/dev/zero of=/dev/null bs=400M count=1": "(exit code 137)",
        "cat /sys/class/net/*/address | wc -l; cat /proc/sys/kernel/hostname": "1\ntask",
        "cd /; export A=1": "",
        "pwd; echo $A-": "/app\n-",
        "sleep 20 & echo begun": "begun",
        "printf '\\377 '": "\ufffd ",
    }
    begin = time.monotonic()
    tree = play(engine, task, *map(shell, commands), "Done", max_turns=20, timeout_s=6.0, output_bytes=200)
    assert time.monotonic() - begin < 60
    answers = [part.partition("<end>\n<assistant>")[0] for part in said(tree).split("<tool>")[1:]]
    for answer, (command, expected) in zip(answers, commands.items(), strict=True):
        assert expected in answer, (command, answer)
        assert len(answer) < 300
    assert rewards(tree) == [1.0]


@pytest.mark.slow
def test_calls_of_another_form_are_answered_by_errors(engine, tmp_path) -> None:
    wrong = (
        call("shell", command=3) + call("shell") + call("shell", command="ls", user="root") + call("sh", command="ls")
    )
    tree = play(engine, write_task(tmp_path), wrong, "Done")
    assert said(tree).count("<tool>error: ") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("script", "reward"), [
    ("echo '{\"reward\": 0.5, \"style\": 1}' > reward.json; echo 7 > reward.txt", 0.5),
    ("echo 0.75 > reward.json", 0.75), ("echo true > reward.json", 1.0), ("echo ' 1 ' > reward.txt", 1.0),
    ("echo -2.5e-1 > reward.txt; exit 1", -0.25),
])  # fmt: skip
def test_rewards_are_read_as_harbor_reads_them(engine, tmp_path, script, reward) -> None:
    task = write_task(tmp_path, test=f"#!/bin/sh\ncd /logs/verifier; {script}")
    assert rewards(play(engine, task, "Done")) == [reward]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "sentence"), [
    ("echo no pytest here", "wrote no reward to /logs/verifier (no pytest here)"),
    ("echo nan > reward.txt", "gives reward = nan"), ("echo 1e999 > reward.json", "gives reward = inf"),
    ("echo two > reward.txt", "wrote 'two\\n' to reward.txt"), ("> reward.txt", "wrote '' to reward.txt"),
    ("echo '{\"score\": 1}' > reward.json", "has 'score' and no 'reward'"),
    ("echo [1] > reward.json", "no finite number"),
    ("ln -s /etc/hostname reward.txt", "wrote no reward"), ("mkfifo reward.txt", "wrote no reward"),
    ("sleep 60", "did not end within 2 s"),
])  # fmt: skip
def test_tests_without_a_reward_fail_the_episode(engine, tmp_path, script, sentence) -> None:
    toml = f'[environment]\ndocker_image = "{IMAGE}"\nallow_internet = false\n[verifier]\ntimeout_sec = 2'
    task = write_task(tmp_path, toml=toml, test=f"#!/bin/sh\ncd /logs/verifier; {script}")
    tree = play(engine, task, "Done")
    assert list(tree.status) == [LeafStatus.FAILED]
    assert sentence in tree.meta["errors"][0]
    assert "given_rewards" not in tree.meta


@pytest.mark.slow
def test_variables_users_and_health_hold(engine, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ROLLTREE_TEST_OF", "there")
    toml = f"""
[environment]
docker_image = "{IMAGE}"
network_mode = "no-network"
memory = "1G"
workdir = "/srv"
env = {{ A = "${{ROLLTREE_TEST_OF}}", B = "${{NONE_SUCH:-b}}" }}
healthcheck = {{ command = "echo x >> /tmp/looks; [ $(wc -l < /tmp/looks) -ge 3 ]", interval_sec = 0.1 }}
[agent]
user = 1000
[verifier]
user = "root"
env = {{ C = "c" }}
"""
    test = """#!/bin/sh
[ "$C$(id -u)" = c0 ] && [ "$(cat /tmp/told)" = "/srv there b 1000" ] && echo 1 > /logs/verifier/reward.txt
"""
    task = write_task(tmp_path, toml=toml, test=test)
    assert rewards(play(engine, task, shell("echo $(pwd) $A $B $C $(id -u) > /tmp/told"), "Done")) == [1.0]


@pytest.mark.slow
def test_more_episodes_than_containers_wait(engine, tmp_path) -> None:
    seen = []
    task = write_task(tmp_path, test="#!/bin/sh\nsleep 0.2; echo 1 > /logs/verifier/reward.txt")
    watch = threading.Thread(target=lambda: [(seen.append(len(containers())), time.sleep(0.05)) for _ in range(40)])
    watch.start()
    tree = play(engine, task, shell("sleep 0.2"), "Done", n=6, containers=2)
    watch.join()
    assert rewards(tree) == [1.0] * 6
    assert 0 < max(seen) <= 3  # one that is being removed is still seen
