"""Runs commands, one an episode, each in a directory of its own, and ends all that they have started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..programs import AgentCalls
from ..sandbox import PLACE, at_place
from .episode import Episode
from .records import AgentError, Failure

MARK = "ROLLTREE_EPISODE"
"""Environment variable with an episode's id, by which processes that left its group are found."""
OTHER_KEYS = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")
"""Variables that clients send as well, or instead of the episode's key."""
STDERR = 500
"""Characters of the end of a command's stderr in the reason of its failure."""
LOOK_S = 0.02
END_S = 5.0
"""Seconds in which what is asked to end must do so."""
REAPER = """
import os, shutil, signal, sys, time
alive = {}
for line in sys.stdin:
    sign, (pid, mark) = line[0], line[1:].split()
    if sign == "+":
        alive[mark] = int(pid)
    else:
        alive.pop(mark, None)
for pid in alive.values():
    try:
        if pid:
            os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
marks = {("ROLLTREE_EPISODE=" + mark).encode() for mark in alive}
quiet = 0
for _ in range(100):  # one may be about to start, or start another
    if not marks or quiet == 3 or not os.path.isdir("/proc/self"):
        break
    quiet += 1
    for name in os.listdir("/proc"):
        try:
            with open("/proc/" + name + "/environ", "rb") as file:
                if name.isdigit() and marks & set(file.read().split(b"\\0")):
                    os.kill(int(name), signal.SIGKILL)
                    quiet = 0
        except OSError:
            pass
    time.sleep(0.1)
for above, names, _ in os.walk(sys.argv[1]):
    for name in names:
        if not os.path.islink(os.path.join(above, name)):
            os.chmod(os.path.join(above, name), 0o700)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Runs beside the run and ends the commands that are left when the run is gone, killed or not; then their directories
are removed."""


ENDED = Failure("dropped", "its episode has ended")


class Commands:
    """Runs the commands of a run.

    Args:
        program: names the command.

    Raises:
        UserError: there is no such command.
    """

    def __init__(self, program: AgentCalls) -> None:
        assert program.command is not None
        if shutil.which(program.command[0]) is None:
            raise UserError(f"rollout.program_options.command: there is no program '{program.command[0]}'.")
        self._command, self._environment = program.command, program.environment
        self._at_place = not program.note
        self._changed = threading.Condition()
        self._running, self._closed = 0, False
        self._reaper: subprocess.Popen[str] | None = None
        self._folders = Path()

    def run(self, episode: Episode, address: str) -> Any:
        """Run the command of an episode, until that ends, and return its reward, None where it gives none.

        Args:
            address: of the run's server.

        Raises:
            AgentError: it failed, or the episode has ended before.
        """
        with self._changed:
            self._begin()
            self._running += 1
            folder = Path(tempfile.mkdtemp(dir=self._folders))
            self._tell("+", 0, episode)
        try:
            return self._run(episode, address, folder)
        finally:
            _remove(folder)
            with self._changed:
                self._tell("-", 0, episode)
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the commands of episodes that have all ended, and remove what they have left."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, END_S)
            if self._reaper is not None and self._reaper.stdin is not None:
                self._reaper.stdin.close()
                with suppress(subprocess.TimeoutExpired):
                    self._reaper.wait(END_S)

    def _run(self, episode: Episode, address: str, folder: Path) -> Any:
        here = folder / "episode"
        for name in ("episode/work", "episode/home", "episode/tmp", "root"):
            (folder / name).mkdir(parents=True)
        (here / "task.json").write_text(json.dumps(episode.task, default=str), encoding="utf-8")
        words = [_absolute(word) for word in self._command]
        words = at_place(folder, self._folders, words) if self._at_place else words
        stderr = folder / "stderr.txt"
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                words, cwd=here / "work", env=self._variables(episode, address, here), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        with self._changed:
            self._tell("+", process.pid, episode)
        try:
            while process.poll() is None and not episode.ended:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
            code = process.poll()
        finally:
            _end_all(process, episode)
        if code is None:
            raise AgentError(*ENDED)
        if code:
            said = stderr.read_bytes()[-4 * STDERR :].decode(errors="replace")
            raise failed(self._command[0], code, said)
        reward = here / "reward.json"
        if not reward.is_file():
            return None
        try:
            return json.loads(reward.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise AgentError("reward", "the file of ROLLTREE_REWARD holds no JSON") from error

    def _variables(self, episode: Episode, address: str, here: Path) -> dict[str, str]:
        """Return the environment of a command whose files are in ``here``."""
        place = Path(PLACE) if self._at_place else here
        return {
            **{name: value for name, value in os.environ.items() if name not in OTHER_KEYS},
            "HOME": str(place / "home"),
            "TMPDIR": str(place / "tmp"),
            "PWD": str(place / "work"),
            **by_no_proxy(os.environ.get("NO_PROXY")),
            **self._environment,
            **calling(episode, address),
            "ROLLTREE_TASK": str(place / "task.json"),
            "ROLLTREE_REWARD": str(place / "reward.json"),
            MARK: episode.id,
        }

    def _begin(self) -> None:
        """Make the directory of all commands and start the reaper, if it is the first one's turn.

        Raises:
            AgentError: no further command may begin.
        """
        if self._closed:
            raise AgentError(*ENDED)
        if self._reaper is None:
            self._folders = Path(tempfile.mkdtemp(prefix="rolltree-agents-"))
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", "-c", REAPER, str(self._folders)], stdin=subprocess.PIPE, text=True,
                start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def _tell(self, sign: str, pid: int, episode: Episode) -> None:
        """Tell the reaper of a process group that begins (0: is about to) or has ended."""
        assert self._reaper is not None
        assert self._reaper.stdin is not None
        if not self._reaper.stdin.closed:
            with suppress(OSError):
                self._reaper.stdin.write(f"{sign}{pid} {episode.id}\n")
                self._reaper.stdin.flush()


def by_no_proxy(others: str | None) -> dict[str, str]:
    """Return the variables by which clients call the run's address themselves, and ``others`` that they had so."""
    direct = ",".join(filter(None, (others, "127.0.0.1")))
    return {"NO_PROXY": direct, "no_proxy": direct}


def calling(episode: Episode, address: str) -> dict[str, str]:
    """Return the variables by which clients of the protocols call the model for an episode."""
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": episode.key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": episode.key,
        "ROLLTREE_URL": address,
    }


def failed(program: str, code: int, said: str) -> AgentError:
    """Return the error of a command that has ended with ``code``, negative for a signal, and ``said`` something."""
    said = " ".join(said.split())[-STDERR:]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return AgentError("signal" if code < 0 else "exit", f"{program} ended with {how}" + (f": {said}" if said else ""))


def _absolute(word: str) -> str:
    """Return a word of the command with the path of a file of the run's directory, as agents run in others."""
    return str(Path(word).absolute()) if "/" not in word[:1] and Path(word).is_file() else word


def _remove(folder: Path) -> None:
    """Remove a directory with all that is in it, also what the user may not write to."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for above, names, _ in os.walk(folder):
            for path in (Path(above) / name for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)


def _end_all(process: subprocess.Popen[bytes], episode: Episode) -> None:
    """Kill the process group, and processes that left it."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not Path("/proc/self").exists():
        return
    for _ in range(3):  # one may start another while it is looked for
        killed = False
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    if f"{MARK}={episode.id}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)
                        killed = True
        if not killed:
            return
