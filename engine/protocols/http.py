"""The parts that servers of the protocols share: reading a body, refusals, and streams that end with their clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..rollout import TooLongError
from . import anthropic, form
from .calls import AnswerForm, is_anthropic, refusal

log = logging.getLogger(__name__)
MOST_BYTES = 16 << 20
"""Largest body, in bytes; it is parsed and tokenised before its length in tokens is known."""


class RefusedError(Exception):
    """A request that cannot be served; the message is one sentence, ``code`` OpenAI's name of the mistake, if any."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def told(self, path: str) -> str:
        """Return the message for clients of the path's protocol."""
        return str(self)


class ContextLengthError(RefusedError):
    """The refusal of what is longer than the context, in the words by which clients know that they must shorten it."""

    def __init__(self, wrong: TooLongError) -> None:
        super().__init__(str(wrong), 400, "context_length_exceeded")
        self.wrong = wrong

    def told(self, path: str) -> str:
        words = anthropic.too_long if is_anthropic(path) else form.too_long
        return f"{words(self.wrong.prompt, self.wrong.max_tokens, self.wrong.limit)} {self.wrong}"


async def to_their_end(events: AsyncIterator[str], form: AnswerForm, path: str) -> AsyncIterator[str]:
    """Yield the events of a stream; an error in them is told as the protocol does, so that every stream has an end."""
    try:
        async for event in events:
            yield event
    except RefusedError as wrong:
        yield form.failed(wrong.told(path), wrong.status, wrong.code) + form.close([], 0)
    except Exception as wrong:
        log.exception("An answer cannot be told.")
        yield form.failed(_sentence(wrong)) + form.close([], 0)


def refused(wrong: ValueError) -> RefusedError:
    """Return the refusal of a request in which something is wrong."""
    return ContextLengthError(wrong) if isinstance(wrong, TooLongError) else RefusedError(str(wrong))


def handle_errors(app: Starlette) -> None:
    """Let ``app`` answer errors in the form of the path's protocol."""
    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    app.add_exception_handler(ClientDisconnect, _client_is_gone)
    app.add_exception_handler(Exception, _fail)


class Events(StreamingResponse):
    """A stream that calls ``ended`` when it is over, even if it never started."""

    def __init__(self, content: AsyncIterator[str], ended: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(content, headers=headers, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._ended()


async def read_body(http: Request) -> bytes:
    """Read the body, up to `MOST_BYTES`."""
    too_long = RefusedError(f"The body exceeds {MOST_BYTES >> 20} MiB; send less at once.", 413)
    announced = http.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MOST_BYTES:
        raise too_long
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise too_long
        parts.append(part)
    return b"".join(parts)


async def _refuse(http: Request, wrong: Exception) -> JSONResponse:
    path = http.url.path
    if isinstance(wrong, HTTPException):  # unknown path, or wrong method
        message = f"{http.method} {path}: {wrong.detail}."
        return JSONResponse(refusal(path, message, wrong.status_code), wrong.status_code, wrong.headers)
    assert isinstance(wrong, RefusedError)
    return JSONResponse(refusal(path, wrong.told(path), wrong.status, wrong.code), wrong.status, wrong.headers)


async def _client_is_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


async def _fail(http: Request, wrong: Exception) -> JSONResponse:
    return JSONResponse(refusal(http.url.path, _sentence(wrong), 500), 500)


def _sentence(wrong: Exception) -> str:
    return " ".join(f"{type(wrong).__name__}: {wrong}".split())[:500]
