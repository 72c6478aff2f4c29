"""Commands of episodes: the same directory, home and address in all, nobody else's files, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import Qwen3ForCausalLM

from rolltree.engine.data.tree import TokenTree
from rolltree.engine.programs import AgentCalls
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.sandbox import PLACE, no_place

from ...support import serving
from ...support.agents import job, run
from ...support.conversations import TEMPLATE

TELLS = """
import json, os, signal, subprocess, sys, tempfile, time, urllib.request
task = json.load(open(os.environ["ROLLTREE_TASK"]))
names = ("HOME", "TMPDIR", "PWD", "OPENAI_BASE_URL", "ROLLTREE_URL", "ROLLTREE_TASK")
seen = {name: os.environ[name] for name in names}
seen |= {"cwd": os.getcwd(), "files": sorted(os.listdir(".") + os.listdir(os.environ["HOME"]))}
seen["user"] = [os.getuid(), os.getgid(), signal.getsignal(signal.SIGPIPE) is not None]
barrier, episodes = sys.argv[1], int(sys.argv[2])
tempfile.NamedTemporaryFile(dir=barrier, delete=False).close()
for folder in (".", os.environ["HOME"], tempfile.gettempdir()):
    open(os.path.join(folder, "same name"), "x").close()
os.makedirs("locked/in")
os.chmod("locked/in", 0)
os.chmod("locked", 0)
while len(os.listdir(barrier)) < episodes:  # all have written their files
    time.sleep(0.01)
seen["others"] = [name for above, _, names in os.walk(os.environ["TMPDIR_OF_TEST"]) for name in names]
prompt = [{"role": "user", "content": json.dumps(seen)}]
body = json.dumps({"messages": prompt, "max_tokens": 6}).encode()
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
json.load(urllib.request.urlopen(asked))
json.dump({"reward": 0.5}, open(os.environ["ROLLTREE_REWARD"], "w"))
"""


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    words, config = serving.tokenizer(), serving.model().config
    words.chat_template = "#" + TEMPLATE
    config.max_position_embeddings = 4096
    return NativeEngine(Qwen3ForCausalLM(config).eval(), words, EngineConfig(page_size=16, kv_tokens=32768))


def told(engine: NativeEngine, tree: TokenTree) -> list[dict[str, Any]]:
    """Return the text that each episode wrote into its prompt."""
    words: Any = engine.tokenizer
    prompts = [
        words.decode(tree.token_id[tree.path_rows(leaf)[: int(tree.leaf_prompt[leaf])]])
        for leaf in range(tree.num_leaves)
    ]
    return [json.loads(text[text.index("{") : text.rindex("}") + 1]) for text in prompts]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, and all that a test may leave there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR_OF_TEST", str(folder))
    return folder


def tell(engine: NativeEngine, folder: Path, n: int) -> TokenTree:
    (folder / "tells.py").write_text(TELLS)
    (folder / "barrier").mkdir()
    command = [sys.executable, str(folder / "tells.py"), str(folder / "barrier"), str(n)]
    tree = run(engine, job(engine, n=n, max_new_tokens=2000), command=command, timeout_s=60)
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert set(tree.meta["given_rewards"].values()) == {0.5}
    return tree


@pytest.mark.slow
@pytest.mark.skipif(bool(no_place()), reason="this system has no namespaces of mounts")
def test_episodes_share_all_that_they_tell_of_where_they_run(
    engine: NativeEngine, tmp_path: Path, temporary: Path
) -> None:
    n = 6
    tree = tell(engine, tmp_path, n)
    (seen, *others) = told(engine, tree)
    assert all(other == seen for other in others)
    assert seen["cwd"] == seen["PWD"] == f"{PLACE}/work"
    assert (seen["HOME"], seen["ROLLTREE_TASK"]) == (f"{PLACE}/home", f"{PLACE}/task.json")
    assert seen["files"] == [], "each begins in empty directories"
    assert seen["others"] == [], "none finds files of another"
    assert seen["user"][:2] == [os.getuid(), os.getgid()]
    prompt, sampled = int(tree.leaf_prompt[0]), int(tree.loss_mask.sum())
    assert tree.num_tokens == prompt + sampled, "the prompt is stored once"
    assert tree.logical_tokens / tree.num_tokens > 0.8 * n
    assert list(temporary.iterdir()) == []
    assert not any(PLACE in line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    assert not Path(PLACE).exists()


def test_without_namespaces_directories_differ_and_this_is_told(
    engine: NativeEngine, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address and all else is the same then too."""
    assert AgentCalls(command=["true"]).note == "" or no_place()
    monkeypatch.setenv("ROLLTREE_SANDBOX_WITHOUT", "namespaces")
    said = AgentCalls(command=["true"]).note
    assert "directories of different names (ROLLTREE_SANDBOX_WITHOUT takes namespaces away)" in said
    assert AgentCalls(agent="a.py:f").note == ""
    seen = told(engine, tell(engine, tmp_path, 2))
    assert seen[0]["cwd"] != seen[1]["cwd"]
    assert seen[0]["OPENAI_BASE_URL"] == seen[1]["OPENAI_BASE_URL"]
    assert [one["files"] for one in seen] == [[], []]
    assert list(temporary.iterdir()) == []


def test_the_environment_of_a_command_is_its_own_to_set(engine: NativeEngine, tmp_path: Path, temporary: Path) -> None:
    out = tmp_path / "out"
    words = ["sh", "-c", f"echo $HOME $EXTRA > {out}; exit 3"]
    tree = run(engine, job(engine, n=1), command=words, environment={"HOME": "/root", "EXTRA": "on"})
    assert out.read_text() == "/root on\n"
    assert "sh ended with exit code 3" in tree.meta["errors"][0]


@pytest.mark.slow
@pytest.mark.parametrize("without", ["", "namespaces"])
def test_a_killed_run_leaves_no_process_mount_or_directory(tmp_path: Path, temporary: Path, without: str) -> None:
    """SIGKILL of the whole run while its commands work, and hold files."""
    script = (
        "import sys, tempfile, threading, types\n"
        "from rolltree.engine.agents.commands import Commands\n"
        "from rolltree.engine.programs import AgentCalls\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "busy = 'mkdir -p a/b; chmod 0 a; setsid sleep 77.5 & echo > %s/$ROLLTREE_EPISODE; sleep 77.5' % sys.argv[2]\n"
        "commands = Commands(AgentCalls(command=['sh', '-c', busy]))\n"
        "for n in range(3):\n"
        "    episode = types.SimpleNamespace(id=f'{n}', key='k', task={}, ended=False)\n"
        "    threading.Thread(target=commands.run, args=(episode, 'http://127.0.0.1:1')).start()\n"
    )
    (tmp_path / "begun").mkdir()
    words = [sys.executable, "-c", script, str(temporary), str(tmp_path / "begun")]
    process = subprocess.Popen(words, env={**os.environ, "ROLLTREE_SANDBOX_WITHOUT": without})
    until(lambda: len(list((tmp_path / "begun").iterdir())) == 3 and len(sleeping()) == 6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not sleeping() and not list(temporary.iterdir()))


def sleeping() -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if process.cmdline() == ["sleep", "77.5"] else []
        except psutil.Error:
            continue
    return found


def until(true: Any) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
