"""The key that clients of a server must send, and who may do without one."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import UserError
from .calls import refusal

VARIABLE = "ROLLTREE_API_KEY"
"""Environment variable with the key; unlike an argument, other users of the machine cannot read it."""
OPEN = "/health"
"""The only path that needs no key, because probes send none; it tells counts and the engine's state."""
SIGNED = "/api/v1/files/"
"""Beginning of addresses that need no key, because each has a signature of the server's own."""


def key_of(headers: Headers) -> bytes:
    """Return the key of ``Authorization: Bearer KEY``, or of ``x-api-key``, as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return (bearer or headers.get("x-api-key", "")).encode()


def same_key(sent: bytes, expected: bytes) -> bool:
    """Return whether the keys are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(sent, expected)


class KeyGate:
    """Middleware that refuses requests without the key (`key_of`), whatever their path but `OPEN` and `SIGNED`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] == OPEN
            or scope["path"].startswith(SIGNED)
            or same_key(key_of(Headers(scope=scope)), self._expected)
        ):
            await self._app(scope, receive, send)
            return
        message = "The key is missing or wrong; send the server's own as `Authorization: Bearer KEY`."
        refused = refusal(scope["path"], message, 401, "invalid_api_key")
        await JSONResponse(refused, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


def check_key(key: str | None, listening: socket.socket) -> None:
    """Check the key of a server that listens on a socket.

    Raises:
        UserError: clients cannot send the key, or there is none and other machines can reach the address.
    """
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UserError(
            f"The key of --api_key or {VARIABLE} is empty, or has blanks or characters outside ASCII; give one without."
        )
    address = listening.getsockname()[0]
    if key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise UserError(
            f"Other machines can reach {address}, so clients must send a key; set {VARIABLE} or --api_key, or leave "
            "out --host."
        )
