"""Servers of OpenEnv's protocol: what they offer to a model, and the sessions of episodes, by the official client."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
import urllib.request
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...chat.schemas import inlined
from ...errors import UserError
from ...parts.calling import failure
from .background import BACKGROUND
from .entries import Pairs, filled, is_loopback
from .process import DIRECT, Command

LISTED = ("tool_name", "arguments")
"""Fields of the action that calls one of the tools that a server lists."""
STEP = "step"
"""Name of the tool that takes an action with several fields."""
OPENING = 64
"""Sessions that are opened at once."""
LOOK_S = (0.05, 1.0)
"""Seconds after which a full server is asked for a session again, at first and at most."""
RESTARTS = 4
"""Attempts to reach a server that has ended and whose command is to start it again."""
CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)$")


class FullError(Exception):
    """The server has no session left."""


class LostError(UserError):
    """The server has ended the connection, or takes none."""


class RefusedError(Exception):
    """The server takes no such action."""


@dataclass(frozen=True)
class Offer:
    """The offer of a server to a model.

    Attributes:
        tools: descriptions for a chat template; none if the model's text is the action.
        text: the field of the action that takes this text.
        listed: the tools are those that the server lists, and not its action.
        action: the JSON schema of actions.
    """

    tools: tuple[dict[str, Any], ...]
    text: str | None
    listed: bool
    action: Mapping[str, Any]

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the action of a call."""
        if self.listed:
            return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        return dict(arguments)


@dataclass(frozen=True)
class Result:
    """The answer of a server to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool
    truncated: bool


class Server:
    """A server at an address, or one that a command starts.

    Args:
        place: the address, or the command.
        headers: of requests to the address, with environment variables in them as `filled` takes them.
    """

    def __init__(self, place: str | tuple[str, ...], headers: Pairs = ()) -> None:
        _client_class()  # which takes seconds to import
        self._command = None if isinstance(place, str) else Command(place)
        self._place, self._headers = place, headers
        self._opening = threading.BoundedSemaphore(OPENING)
        self._freed = threading.Condition()
        self._lock = threading.Lock()
        self._offer: Offer | None = None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        BACKGROUND.at_end(self.close)

    def __str__(self) -> str:
        return f"The environment `{self._place if isinstance(self._place, str) else ' '.join(self._place)}`"

    def address(self) -> str:
        """Return the server's address; the command is started where it does not run.

        Raises:
            UserError: it cannot be started.
        """
        return str(self._place).rstrip("/") if self._command is None else self._command.address()

    def headers(self) -> dict[str, str]:
        """Return the headers of a request.

        Raises:
            UserError: an environment variable that they take is not set.
        """
        return filled(self._headers, "header")

    def offer(self) -> Offer:
        """Return what the server offers, as it said when it was first asked.

        Raises:
            UserError: it cannot be reached, or says nothing of use.
        """
        with self._lock:
            if self._offer is None:
                action = self._http("/schema").get("action")
                if not isinstance(action, dict):
                    raise UserError(f"{self} describes no action at its address /schema.")
                self._offer = self._offered(action)
            return self._offer

    def _offered(self, action: Mapping[str, Any]) -> Offer:
        fields = {name: of for name, of in action.get("properties", {}).items() if name != "metadata"}
        if set(fields) in (set(), {"type"}, {"type", *LISTED}):
            tools = self._http("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
            listed = (tools.get("result") or {}).get("tools") or []
            if not listed:
                raise UserError(f"{self} takes calls of tools, and lists none.")
            described = tuple(
                described_tool(
                    tool["name"], tool.get("description") or "", tool.get("inputSchema") or tool.get("input_schema")
                )
                for tool in listed
            )
            return Offer(described, None, True, action)
        taken = {**action, "properties": fields}
        kinds = {name: of.get("type") for name, of in inlined(taken)["properties"].items()}
        if list(kinds.values()) == ["string"]:
            return Offer((), next(iter(kinds)), False, action)
        step = described_tool(STEP, action.get("description") or "Acts in the environment.", taken)
        return Offer((step,), None, False, action)

    def first(self, seed: int) -> Result:
        """Return the answer to a reset, in no session.

        Raises:
            UserError: the server does not answer, or with no observation.
        """
        return _result(self, self._http("/reset", {"seed": seed}))

    def session(self, reset: Mapping[str, Any], seconds: float) -> Session:
        """Return a new session after its reset; wait for as long as the server has none to give.

        Raises:
            UserError: the server cannot be reached, its reset took longer than ``seconds``, or it answered no result.
        """
        wait, most = LOOK_S
        restarts = 0 if self._command is None else RESTARTS
        while True:
            with self._opening:
                session = Session(self, self.address())
                try:
                    BACKGROUND.run(session.reset(reset), seconds)
                    self._sessions.add(session)
                    return session
                except FullError:
                    session.close()
                except LostError:
                    session.close()
                    if restarts == 0:
                        raise
                    restarts -= 1  # its end may just not be known yet
                    time.sleep(LOOK_S[1])
                except TimeoutError as error:
                    session.close()
                    raise UserError(f"{self} did not return within {seconds:g} s from a reset.") from error
                except BaseException:
                    session.close()
                    raise
            with self._freed:
                self._freed.wait(wait)
            wait = min(2 * wait, most)

    def close(self) -> None:
        """End the sessions, and the server if a command has started it."""
        for session in list(self._sessions):
            session.close()
        if self._command is not None:
            self._command.close()

    def freed(self) -> None:
        """Let one that waits ask for a session."""
        with self._freed:
            self._freed.notify()

    def _http(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = self.address() + path
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        for name, value in self.headers().items():
            request.add_unredirected_header(name, value)
        opener = DIRECT if is_loopback(url) else urllib.request.build_opener()
        try:
            with opener.open(request, timeout=60.0) as answer:
                content = json.loads(answer.read())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self} cannot be asked at {url} ({error}); see that it runs and is an OpenEnv server."
            ) from error
        if not isinstance(content, dict):
            raise UserError(f"{self} answers at {url} with no JSON object; see that it is an OpenEnv server.")
        return content


@functools.cache
def _server(place: str | tuple[str, ...], headers: Pairs = ()) -> Server:
    return Server(place, headers)


def find_server(url: str | None, command: Sequence[str] | None, headers: Mapping[str, str] | None = None) -> Server:
    """Return the server of this process at ``url``, or that of ``command``.

    Raises:
        UserError: both are given or none, one is of another form, or an environment variable is not set.
    """
    if (url is None) == (command is None):
        raise UserError('openenv needs one of the options `url` ("http://...") and `command` (a list of words).')
    if url is not None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise UserError(f"The option `url` of openenv is {url!r}; give an address such as http://127.0.0.1:8000.")
        server = _server(url, tuple(sorted((headers or {}).items())))
        server.headers()
        return server
    if headers:
        raise UserError("The option `headers` of openenv goes with `url`; a command's server takes none.")
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise UserError(f"The option `command` of openenv is {command!r}; give the words of a command as a list.")
    return _server(tuple(command))


def served_schemas(tool: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the descriptions of the tools that an OpenEnv server offers."""
    return find_server(**tool["openenv"]).offer().tools


def described_tool(name: str, description: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the description of a server's tool for a chat template, its local references resolved."""
    shown = inlined(parameters or {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}


class Session:
    """One episode on a server; its coroutines run in `BACKGROUND`."""

    def __init__(self, server: Server, address: str) -> None:
        self.server = server
        self.first: Result | None = None
        self._client = _client_class()(
            address, message_timeout_s=None, websocket_ping_interval_s=None, connect_timeout_s=30.0, mode="simulation",
            headers=server.headers(),
        )  # fmt: skip
        self._closed = False

    async def reset(self, options: Mapping[str, Any]) -> None:
        """Begin the episode."""
        self.first = await self._asked(self._client.reset(**options))

    async def step(self, action: Mapping[str, Any]) -> Result:
        """Return the server's answer to an action.

        Raises:
            RefusedError: the action has another form than the server's.
            UserError: the server has ended the session, or answered no result.
        """
        return await self._asked(self._client.step(action))

    async def _asked(self, answer: Awaitable[Any]) -> Result:
        try:
            step = await answer
        except Exception as error:
            code = CODE.search(str(error)) if isinstance(error, RuntimeError) else None
            if code is not None and code[1] == "CAPACITY_REACHED":
                raise FullError from error
            if code is not None and code[1] == "VALIDATION_ERROR":
                raise RefusedError(str(error)) from error
            if code is not None:
                raise UserError(f"{self.server} failed: {str(error).rstrip('.')}.") from error
            if isinstance(error, OSError) or type(error).__name__.startswith("ConnectionClosed"):
                raise LostError(f"{self.server} ended the connection ({failure(error)}); see its log.") from error
            raise UserError(f"{self.server} answered no result ({failure(error)}); see its log.") from error
        return _result(
            self.server,
            {
                "observation": step.observation, "reward": step.reward, "done": step.done,
                "metadata": step.metadata,
            },
        )  # fmt: skip

    def close(self) -> None:
        """End the session, without waiting for it."""
        if not self._closed:
            self._closed = True
            BACKGROUND.start(_closed(self._client, self.server))


async def _closed(client: Any, server: Server) -> None:
    try:
        await client.close()
    finally:
        server.freed()


def _result(server: Server, payload: Mapping[str, Any]) -> Result:
    """Return a server's answer, checked.

    Raises:
        UserError: it is no result.
    """
    observation, reward, done = payload.get("observation"), payload.get("reward"), payload.get("done", False)
    if not isinstance(observation, dict):
        raise UserError(f"{server} answered {str(observation)[:100]!r}, which is no observation.")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise UserError(f"{server} gave the reward {str(reward)[:100]!r}, which is no finite number.")
    said = [observation, observation.get("metadata") or {}, payload.get("metadata") or {}]
    flags = {key: any(isinstance(of, dict) and of.get(key) is True for of in said)
             for key in ("truncated", "is_truncated", "terminated")}  # fmt: skip
    truncated = (flags["truncated"] or flags["is_truncated"]) and not flags["terminated"]
    return Result(observation, None if reward is None else float(reward), bool(done) or truncated, truncated)


@functools.cache
def _client_class() -> Any:
    """Return the official generic client, which does not begin another episode where its connection has ended.

    Raises:
        UserError: it is not installed.
    """
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise UserError('openenv is not installed; install it with `pip install "rolltree[openenv]"`.') from error

    class Client(GenericEnvClient):
        connected = False

        async def _connect_async(self) -> Any:
            if self.connected and (self._ws is None or self._ws.state.name in ("CLOSING", "CLOSED")):
                raise ConnectionError("the connection of the episode has ended")
            done = await super()._connect_async()
            self.connected = True
            return done

    return Client
