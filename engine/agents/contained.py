"""Runs commands in the containers of Harbor's tasks, one an episode, and rewards them by the tasks' tests.

A container has no way to the run but the run's server, which it finds at an address of its own: the run listens in the
container's network, and passes on what connects there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError
from ..programs import AgentCalls
from ..programs.harbor.agent import agents_pool, task_of
from ..programs.harbor.task import COLUMN
from ..programs.harbor.trial import PLACE, Trial
from ..programs.servers.background import BACKGROUND
from ..sandbox.containers import listen_inside
from .commands import END_S, ENDED, MARK, STDERR, by_no_proxy, calling, failed
from .episode import Episode
from .records import AgentError

PORT = 18080
"""Port of the run's server in every container."""
BLOCK = 65536


class Contained:
    """Runs the commands of a run in containers.

    Args:
        program: names the command and the options of containers.

    Raises:
        UserError: there is no engine of containers.
    """

    def __init__(self, program: AgentCalls) -> None:
        assert program.command is not None
        assert program.container is not None
        self._command, self._environment = list(program.command), program.environment
        self._pool = agents_pool(program.container, program.episodes)
        self._changed = threading.Condition()
        self._running, self._closed = 0, False

    def run(self, episode: Episode, address: str) -> Any:
        """Run the command of an episode until that ends, then the tests, and return their rewards.

        Args:
            address: of the run's server.

        Raises:
            AgentError: the command or the tests failed, or the episode has ended before.
        """
        with self._changed:
            if self._closed:
                raise AgentError(*ENDED)
            self._running += 1
        task = {name: value for name, value in episode.task.items() if name != COLUMN}
        files = {"task.json": json.dumps(task, default=str)}
        try:
            trial = Trial(self._pool, task_of(episode.task), files)
            try:
                return self._run(trial, episode, address)
            finally:
                trial.close()
        except UserError as error:
            raise AgentError("container", str(error).rstrip(".")) from error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the commands of episodes that have all ended, and remove their containers."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, END_S)
        self._pool.close()

    def _run(self, trial: Trial, episode: Episode, address: str) -> Any:
        def over() -> bool:
            return episode.ended

        trial.open(over)
        if episode.ended:
            raise AgentError(*ENDED)
        assert trial.container is not None
        seconds = trial.task.config.agent.timeout_sec or float("inf")
        inside = f"http://127.0.0.1:{PORT}"
        variables = {
            **by_no_proxy(None),
            **self._environment,
            **calling(episode, inside),
            "ROLLTREE_TASK": f"{PLACE}/task.json",
            MARK: episode.id,
        }
        with Passage(socket.socket(fileno=listen_inside(trial.container.pid, PORT)), address):
            begun = episode.seconds  # of sampling: an update in between is not the agent's time

            def late() -> bool:
                return episode.ended or episode.seconds - begun > seconds

            done = trial.execute(self._command, float("inf"), variables=variables, most=STDERR, over=late)
        if episode.ended:
            raise AgentError(*ENDED)
        rewards = trial.verify(over)
        if done.code:
            episode.rewarded(rewards)  # it may have ended so as its calls were refused
            raise failed(self._command[0], done.code, done.text)
        return rewards


class Passage:
    """Passes on what connects to a listening socket to the run's server, for as long as the block lasts."""

    def __init__(self, listening: socket.socket, address: str) -> None:
        self._listening = listening
        parts = urlsplit(address)
        self._host, self._port = parts.hostname, parts.port
        self._open = set[asyncio.Task[Any]]()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> None:
        BACKGROUND.run(self._start())

    def __exit__(self, *error: object) -> None:
        BACKGROUND.run(self._stop())

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._pass, sock=self._listening)

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            to_read, to_write = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(_copy(reader, to_write), _copy(to_read, writer))
            finally:
                to_write.close()
        except OSError:
            pass  # one side has gone
        finally:
            self._open.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what one side writes to the other, and its end."""
    while block := await reader.read(BLOCK):
        writer.write(block)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
