"""Starts agents, a function or a command each, and ends them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..parts.calling import failure
from ..parts.resolve import import_object
from ..programs import AgentCalls
from .commands import Commands
from .episode import Episode
from .records import AgentError, Failure

if TYPE_CHECKING:
    from .contained import Contained

END_S = 5.0
"""Seconds in which what is asked to end must do so."""


class Agents:
    """Runs the agents of a run.

    Args:
        program: names the function or the command.
        ended: called in any thread when the agent of an episode has ended, with the reason of its failure or None.

    Raises:
        UserError: there is no such function or command.
    """

    def __init__(self, program: AgentCalls, ended: Callable[[Episode, Failure | None], object]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._running: dict[Episode, Future[Any]] = {}  # of coroutines
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._commands: Commands | Contained | None = None
        if program.command is not None:
            self._commands = Commands(program) if program.container is None else _contained(program)
        self._function = None if program.agent is None else import_object(program.agent)
        if self._function is not None:
            try:
                import openai  # noqa: F401
            except ImportError as error:
                raise UserError(
                    "rollout.program_options.agent gets a client of OpenAI's, which is not installed; install openai."
                ) from error

    def start(self, episode: Episode, address: str) -> None:
        """Start the agent of an episode."""
        if self._commands is not None:
            work, name = self._commands.run, "command"
        elif inspect.iscoroutinefunction(self._function):
            self._coroutine(episode, address)
            return
        else:
            work, name = self._plain, "function"
        threading.Thread(
            target=self._guarded, args=(work, episode, address), name=f"rolltree-agent-{name}", daemon=True
        ).start()

    def stop(self, episode: Episode) -> None:
        """Cancel the coroutine of an episode that ends; commands see that it has ended, plain functions hear of it."""
        with self._lock:
            future = self._running.get(episode)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """End all agents; their episodes must have ended."""
        if self._loop is not None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_unwound(self._client), self._loop).result(END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        elif self._client is not None:
            self._client.close()
        if self._commands is not None:
            self._commands.close()

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
            self._running[episode] = future
        future.add_done_callback(over)

    def _why(self, error: BaseException) -> Failure:
        return error.failure if isinstance(error, AgentError) else Failure("raised", failure(error, self._function))

    def _take(self, episode: Episode, reward: Any) -> None:
        if reward is not None:
            try:
                episode.rewarded(reward)
            except ValueError as error:
                raise AgentError("reward", f"ValueError: {error}") from error

    def _over(self, episode: Episode, why: Failure | None) -> None:
        with self._lock:
            self._running.pop(episode, None)
        self._ended(episode, why)


def _contained(program: AgentCalls) -> Contained:
    """Return what runs commands in containers, importing what that needs only when it is asked for."""
    from .contained import Contained

    return Contained(program)


async def _unwound(client: Any) -> None:
    """Cancel all tasks of the loop but this one, wait for their ends, and close the client that they shared."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    if client is not None:
        await client.close()


def timed_out(seconds: float) -> Failure:
    return Failure("timeout", f"TimeoutError: the agent did not return within {seconds:g} s")
