"""Starts agents, a function or a command each, and ends all that they have started."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..parts.calling import failure
from ..parts.resolve import import_object
from ..programs import AgentCalls
from .episode import Episode
from .records import Cause, Failure

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
    sign, pid, mark, folder = line[0], *line[1:].rstrip("\\n").split(" ", 2)
    if sign == "+":
        alive[mark] = int(pid), folder
    else:
        alive.pop(mark, None)
for pid, _ in alive.values():
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
for _, folder in alive.values():
    shutil.rmtree(folder, ignore_errors=True)
"""
"""Runs beside the run and ends the commands that are left when the run is gone, killed or not."""


class Agents:
    """Runs the agents of a run.

    Args:
        program: names the function or the command.
        ended: called in any thread when the agent of an episode has ended, with the reason of its failure or None.

    Raises:
        UserError: there is no such function or command.
    """

    def __init__(self, program: AgentCalls, ended: Callable[[Episode, Failure | None], object]) -> None:
        self.program, self._ended = program, ended
        self._lock = threading.Lock()
        self._running: dict[Episode, Callable[[Failure], object]] = {}  # with what ends each
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._reaper: subprocess.Popen[str] | None = None
        self._function = None if program.agent is None else import_object(program.agent)
        if self._function is not None:
            try:
                import openai  # noqa: F401
            except ImportError as error:
                raise UserError(
                    "rollout.program_options.agent gets a client of OpenAI's, which is not installed; install openai."
                ) from error
        elif program.command is not None and shutil.which(program.command[0]) is None:
            raise UserError(f"rollout.program_options.command: there is no program '{program.command[0]}'.")

    def start(self, episode: Episode, address: str) -> None:
        """Start the agent of an episode."""
        if self._function is None:
            work, name = self._command, "command"
        elif inspect.iscoroutinefunction(self._function):
            self._coroutine(episode, address)
            return
        else:
            work, name = self._plain, "function"
        with self._lock:
            self._running[episode] = lambda why: None
        threading.Thread(
            target=self._guarded, args=(work, episode, address), name=f"rolltree-agent-{name}", daemon=True
        ).start()

    def stop(self, episode: Episode, why: Failure) -> None:
        """End the agent of an episode; a plain function's thread only hears that its episode has ended."""
        with self._lock:
            end = self._running.get(episode)
        if end is not None:
            end(why)

    def close(self) -> None:
        """End all agents."""
        with self._lock:
            left = list(self._running.items())
        for _, end in left:
            end(Failure("dropped", "the run has ended"))
        if self._loop is not None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_unwound(self._client), self._loop).result(END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        elif self._client is not None:
            self._client.close()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._reaper.wait(END_S)

    # -- functions --------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[Episode, str], Any], episode: Episode, address: str) -> None:
        why = None
        try:
            self._take(episode, work(episode, address))
        except BaseException as error:  # sys.exit in an agent must not end the run
            why = self._why(error)
        self._over(episode, why)

    def _plain(self, episode: Episode, address: str) -> Any:
        import openai

        assert self._function is not None
        with self._lock:  # a client takes a tenth of a second to make, so those of episodes share one's connections
            if self._client is None:
                direct = openai.DefaultHttpxClient(trust_env=False)  # by no proxy
                self._client = openai.OpenAI(api_key="none", timeout=None, http_client=direct)
        return self._function(episode.task, self._client.copy(base_url=f"{address}/v1", api_key=episode.key))

    def _coroutine(self, episode: Episode, address: str) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rolltree-agents", daemon=True).start()

        async def work() -> Any:
            import openai

            assert self._function is not None
            if self._client is None:
                direct = openai.DefaultAsyncHttpxClient(trust_env=False)  # by no proxy
                self._client = openai.AsyncOpenAI(api_key="none", timeout=None, http_client=direct)
            client = self._client.copy(base_url=f"{address}/v1", api_key=episode.key)
            return await self._function(episode.task, client)

        future: Future[Any] = asyncio.run_coroutine_threadsafe(work(), self._loop)

        def over(done: Future[Any]) -> None:
            why = None
            try:
                self._take(episode, done.result())
            except BaseException as error:
                why = self._why(error)
            self._over(episode, why)

        with self._lock:
            self._running[episode] = lambda why: future.cancel()
        future.add_done_callback(over)

    def _why(self, error: BaseException) -> Failure:
        return error.failure if isinstance(error, _AgentError) else Failure("raised", failure(error, self._function))

    def _take(self, episode: Episode, reward: Any) -> None:
        if reward is not None:
            try:
                episode.rewarded(reward)
            except ValueError as error:
                raise _AgentError("reward", f"ValueError: {error}") from error

    def _over(self, episode: Episode, why: Failure | None) -> None:
        with self._lock:
            self._running.pop(episode, None)
        self._ended(episode, why)

    # -- commands ---------------------------------------------------------------------------------------------------

    def _command(self, episode: Episode, address: str) -> Any:
        folder = Path(tempfile.mkdtemp(prefix="rolltree-agent-"))
        self._tell("+", 0, episode, folder)
        try:
            return self._run(episode, address, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._tell("-", 0, episode, folder)

    def _run(self, episode: Episode, address: str, folder: Path) -> Any:
        assert self.program.command is not None
        task, reward, stderr = folder / "task.json", folder / "reward.json", folder / "stderr.txt"
        task.write_text(json.dumps(episode.task, default=str), encoding="utf-8")
        (work := folder / "work").mkdir()
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        environment = {
            **{name: value for name, value in os.environ.items() if name not in OTHER_KEYS},
            "NO_PROXY": direct,
            "no_proxy": direct,
            **self.program.environment,
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_BASE": f"{address}/v1",
            "OPENAI_API_KEY": episode.key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": episode.key,
            "ROLLTREE_TASK": str(task),
            "ROLLTREE_REWARD": str(reward),
            "ROLLTREE_URL": address,
            MARK: episode.id,
        }
        words = [_absolute(word) for word in self.program.command]
        stopped: list[Failure] = []
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                words, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        self._tell("+", process.pid, episode, folder)
        with self._lock:
            self._running[episode] = stopped.append
        try:
            while process.poll() is None and not stopped:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
            code = process.poll()
        finally:
            _end_all(process, episode)
        if stopped:
            raise _AgentError(*stopped[0])
        if code:
            said = " ".join(stderr.read_bytes()[-4 * STDERR :].decode(errors="replace").split())[-STDERR:]
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            why = f"{self.program.command[0]} ended with {ended}" + (f": {said}" if said else "")
            raise _AgentError("signal" if code < 0 else "exit", why)
        if not reward.is_file():
            return None
        try:
            return json.loads(reward.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise _AgentError("reward", "the file of ROLLTREE_REWARD holds no JSON") from error

    def _tell(self, sign: str, pid: int, episode: Episode, folder: Path) -> None:
        """Tell the reaper, which is started first, of a process group that begins (0: is about to) or has ended."""
        with self._lock:
            if self._reaper is None:
                self._reaper = subprocess.Popen(
                    [sys.executable, "-S", "-c", REAPER], stdin=subprocess.PIPE, text=True, start_new_session=True,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            if self._reaper.stdin is not None and not self._reaper.stdin.closed:
                with suppress(OSError):
                    self._reaper.stdin.write(f"{sign}{pid} {episode.id} {folder}\n")
                    self._reaper.stdin.flush()


async def _unwound(client: Any) -> None:
    """Cancel all tasks of the loop but this one, wait for their ends, and close the client that they shared."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    if client is not None:
        await client.close()


class _AgentError(Exception):
    """An agent failed, as `failure` says."""

    def __init__(self, cause: Cause, why: str) -> None:
        super().__init__(why)
        self.failure = Failure(cause, why)


def timed_out(seconds: float) -> Failure:
    return Failure("timeout", f"TimeoutError: the agent did not return within {seconds:g} s")


def _absolute(word: str) -> str:
    """Return a word of the command with the path of a file of the run's directory, as agents run in others."""
    return str(Path(word).absolute()) if "/" not in word[:1] and Path(word).is_file() else word


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
