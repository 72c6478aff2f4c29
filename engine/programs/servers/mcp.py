"""Servers of MCP: the tools that they list, and the sessions that call them, by the official SDK."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from ...chat.schemas import inlined
from ...errors import UserError
from ...parts.calling import failure
from ...sandbox.watched import watched
from .background import BACKGROUND
from .contents import text_of
from .entries import Entry, entry_of, filled, is_loopback

START_S = 60.0
"""Seconds in which a session must begin."""
STARTS, CONNECTS = threading.BoundedSemaphore(8), threading.BoundedSemaphore(64)
"""Sessions that begin at once: those that start a process, and those with an address."""
PING_S = 5.0
"""Seconds in which a shared session must answer after a call that took too long."""
PAGES = 100
"""Most pages of a list of tools; one that does not end by then has no end."""
SAID = 2000
"""Bytes of the end of a command's stderr that an error may quote."""
CLOSED = (-32000, "Connection closed")
"""Code and message of the error by which the SDK tells that the connection is closed; servers use the code too."""


class LostError(UserError):
    """A server has ended, or cannot be reached; no fault of the model's."""


class Server:
    """A server of this process: its tools, and the sessions with it."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.shared = entry, entry.shared
        self._lock = threading.Lock()
        self._schemas: list[dict[str, Any]] | None = None
        self._common: Session | None = None
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()
        BACKGROUND.at_end(self.close)

    def __str__(self) -> str:
        return str(self.entry)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the descriptions of the tools that are offered, as the server listed them when it was first asked.

        Raises:
            UserError: it cannot be reached, or lists none of them.
        """
        with self._lock:
            if self._schemas is None:
                session = self._begun()
                try:
                    self._schemas = self.entry.offered(session.schemas)
                except UserError:
                    session.close()
                    raise
                self._common = session  # for the first that needs one
            return self._schemas

    def session(self) -> Session:
        """Return a session: the one that all share, or a new one.

        Raises:
            LostError: the server cannot be reached, or lists other tools than before.
        """
        if self.shared:
            with self._lock:
                if self._common is None or self._common.ended:
                    self._common = self._checked()
                return self._common
        with self._lock:
            kept, self._common = self._common, None  # the session that read the list
        return kept if kept is not None and not kept.ended else self._checked()

    def close(self) -> None:
        """End all sessions."""
        self._common = None
        for session in list(self._open):
            session.close()

    def _checked(self) -> Session:
        session = self._begun()
        try:
            same = self.entry.offered(session.schemas) == self._schemas
        except UserError:
            same = False
        if not same:
            session.close()
            raise LostError(f"{self} lists other tools than when the prompts were written.")
        return session

    def _begun(self) -> Session:
        with CONNECTS if isinstance(self.entry.place, str) else STARTS:
            session = Session(self)
            self._open.add(session)
            session.begin()
            return session


class Session:
    """A session with a server, and with a process of its own where a command runs the server."""

    def __init__(self, server: Server) -> None:
        self.server, self.schemas = server, list[dict[str, Any]]()
        self._began: Future[None] = Future()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._look: asyncio.Task[None] | None = None
        self._said = bytearray()
        self.ended = False

    def begin(self) -> None:
        """Connect, and read the list of tools.

        Raises:
            LostError: this failed or took too long.
        """
        BACKGROUND.start(self._start())
        try:
            self._began.result(START_S)
        except TimeoutError as error:
            self.close()
            raise LostError(f"{self.server} did not begin a session within {START_S:g} s{self._quoted()}.") from error

    def close(self) -> None:
        """End the session, without waiting for it."""
        BACKGROUND.start(self._stop())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result; it runs in `BACKGROUND`.

        Raises:
            LostError: the server ended before it answered.
        """
        from mcp.shared import exceptions

        assert self._task is not None
        refused = getattr(exceptions, "MCPError", None) or exceptions.McpError
        calling = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await asyncio.wait({calling, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise self._lost()
            result = calling.result()
        except refused as error:
            if (error.error.code, error.error.message) == CLOSED:
                raise self._lost() from error
            return f"error: {error}"
        except RuntimeError as error:  # a result of another form than the tool promises
            return f"error: {error}"
        except asyncio.CancelledError:
            if self.server.shared:
                self._look = asyncio.create_task(self._check())
            raise
        except LostError:
            raise
        except Exception as error:
            raise self._lost(failure(error)) from error
        finally:
            calling.cancel()
        return text_of(result.model_dump(by_alias=True, mode="json"), name)

    async def _check(self) -> None:
        """End a shared session that does not answer, so that the next call begins another one."""
        try:
            await asyncio.wait_for(self._client.send_ping(), PING_S)
        except Exception:
            await self._stop()

    async def _start(self) -> None:
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._live())

    async def _stop(self) -> None:
        self.ended = True
        self._ending.set()

    async def _live(self) -> None:
        """Hold the session open until it is to end; its contexts must be left by the task that entered them."""
        from mcp import ClientSession

        try:
            async with AsyncExitStack() as stack:
                streams = await stack.enter_async_context(await self._transport(stack))
                self._client = await stack.enter_async_context(ClientSession(*streams[:2]))
                await self._client.initialize()
                self.schemas = await _listed(self._client)
                self._began.set_result(None)
                await self._ending.wait()
        except BaseException as error:
            if not self._began.done():
                self._began.set_exception(self._lost(failure(_innermost(error))))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.ended = True

    async def _transport(self, stack: AsyncExitStack) -> Any:
        """Return the transport; ``stack`` closes what it needs."""
        from mcp import StdioServerParameters
        from mcp.client import stdio, streamable_http

        entry = self.server.entry
        if isinstance(entry.place, str):
            library: Any = getattr(streamable_http, "httpx2", None) or streamable_http.httpx
            client = await stack.enter_async_context(
                library.AsyncClient(
                    trust_env=not is_loopback(entry.place), headers=filled(entry.headers, "header"),
                    timeout=library.Timeout(30.0, read=None), verify=_trust(library),
                    event_hooks={"response": [self._note]},
                )
            )  # fmt: skip
            sizes = {"max_sse_event_size": None} if hasattr(streamable_http, "DEFAULT_MAX_SSE_EVENT_SIZE") else {}
            return streamable_http.streamable_http_client(entry.place, http_client=client, **sizes)
        program, *words = watched(entry.place)
        read, write = os.pipe()
        loop = asyncio.get_running_loop()
        os.set_blocking(read, False)
        loop.add_reader(read, self._listen, read)
        errors = os.fdopen(write, "w")
        variables = os.environ | filled(entry.env, "variable")
        parameters = StdioServerParameters(command=program, args=words, env=dict(variables))
        return _Quiet(stdio.stdio_client(parameters, errlog=errors), errors)

    def _listen(self, pipe: int) -> None:
        """Keep the end of what the command writes to stderr."""
        with suppress(BlockingIOError):
            if not (said := os.read(pipe, 65536)):
                asyncio.get_running_loop().remove_reader(pipe)
                os.close(pipe)
                return
            self._said += said
            del self._said[:-SAID]

    async def _note(self, response: Any) -> None:
        """Keep the status of an answer that refuses; the SDK of version 2 does not tell it. A server without a stream
        of its own answers 405."""
        if response.status_code >= 400 and response.status_code != 405:
            self._said[:] = f"HTTP {response.status_code} {response.reason_phrase}".encode()

    def _lost(self, why: str = "") -> LostError:
        self.ended = True
        self._ending.set()
        return LostError(f"{self.server} ended the session{f' ({why})' if why else ''}{self._quoted()}.")

    def _quoted(self) -> str:
        said = " ".join(self._said.decode(errors="replace").split())[-300:]
        return f": {said.rstrip('.')}" if said else ""


class _Quiet:
    """A transport whose end of a pipe is closed once the process has its own."""

    def __init__(self, inner: Any, errors: Any) -> None:
        self._inner, self._errors = inner, errors

    async def __aenter__(self) -> Any:
        try:
            return await self._inner.__aenter__()
        finally:
            self._errors.close()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._inner.__aexit__(*error)


class Link:
    """The use of a server by one conversation; its session begins when it is needed, and ends with the link."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._session: Session | None = None

    @property
    def has_state(self) -> bool:
        """True if a session of the conversation's own has begun."""
        return self._session is not None and not self.server.shared

    def open(self) -> None:
        """Begin the session.

        Raises:
            LostError: it cannot be begun.
        """
        if self._session is None or (self.server.shared and self._session.ended):
            self._session = self.server.session()
            if not self.server.shared:
                weakref.finalize(self, self._session.close).atexit = False

    def close(self) -> None:
        """End the session, if it is the conversation's own."""
        if self._session is not None and not self.server.shared:
            self._session.close()

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Return the text of a tool's result.

        Raises:
            LostError: the server ended before it answered.
        """
        if self._session is None:
            await asyncio.to_thread(self.open)
        assert self._session is not None
        return await BACKGROUND.result(self._session.call(name, arguments))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self.has_state:
            raise UserError(f"{self.server} cannot copy a session; set `shared` to true.")
        return type(self)(self.server)


@functools.cache
def _server(entry: Entry) -> Server:
    return Server(entry)


def find_server(tool: Mapping[str, Any]) -> Server:
    """Return the server of this process that an entry of `data.tools` names.

    Raises:
        UserError: the SDK is not installed, or as for `entry_of`.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError('data.tools needs the SDK of MCP; install it with `pip install "rolltree[mcp]"`.') from error
    return _server(entry_of(tool))


def listed_schemas(tool: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the descriptions of the tools of a server."""
    return find_server(tool).schemas()


@functools.cache
def _trust(library: Any) -> Any:
    """Return the certificates of an HTTP library; reading them takes longer than beginning a session."""
    return library.create_ssl_context()


async def _listed(client: Any) -> list[dict[str, Any]]:
    """Return the descriptions of all tools for a chat template.

    Raises:
        ValueError: the list does not end.
    """
    from mcp.types import PaginatedRequestParams

    schemas, cursor = [], None
    for _ in range(PAGES):
        page = await client.list_tools(params=None if cursor is None else PaginatedRequestParams(cursor=cursor))
        shown = page.model_dump(by_alias=True, mode="json")
        for tool in shown["tools"]:
            parameters = inlined(tool.get("inputSchema") or {"type": "object", "properties": {}})
            function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
            schemas.append({"type": "function", "function": function})
        if not (cursor := shown.get("nextCursor")):
            return [json.loads(json.dumps(schema)) for schema in schemas]
    raise ValueError(f"its list of tools has more than {PAGES} pages")


def _innermost(error: BaseException) -> BaseException:
    """Return the first error of a group that is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
