"""`rolltree serve`: a model, its engine and its server in one process, which ends soon after it is told to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from ...errors import UserError
from ...model.loading import choose_device, load_model, load_tokenizer
from ...rollout import EngineConfig, NativeEngine
from .app import make_app

GRACE_S = 2
"""Between the signal to end and the end of what is still being answered."""
END_S = 4.0
"""Between the signal and the end of the process, whatever still hangs in it."""


class Server(uvicorn.Server):
    """Says where it listens, and ends within `END_S` of SIGTERM or SIGINT."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"rolltree: serving at {self._url}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            end = threading.Timer(END_S, os._exit, (128 + sig,))
            end.daemon = True
            end.start()
        super().handle_exit(sig, frame)


def serve(
    path: str, *, name: str | None, host: str, port: int, dtype: str, device: str, kv_tokens: int, debug: bool
) -> None:
    """Serve until told to end.

    Raises:
        UserError: the model, its tokenizer, the sizes or the address will not do.
    """
    try:
        config = EngineConfig(kv_tokens=kv_tokens)
    except ValueError as error:
        raise UserError(str(error)) from error
    listening = _listen(host, port)
    tokenizer = load_tokenizer(path)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a directory without one
        raise UserError(
            f"'{path}' has no tokenizer, and a server speaks in texts; save the tokenizer beside the model."
        )
    model = load_model(path, dtype=getattr(torch, dtype), device=choose_device(device))
    app = make_app(NativeEngine(model, tokenizer, config), name or Path(path).resolve().name)
    level = "debug" if debug else "warning"
    settings = uvicorn.Config(app, log_level=level, timeout_graceful_shutdown=GRACE_S)
    address = f"[{host}]" if ":" in host else host
    Server(settings, f"http://{address}:{listening.getsockname()[1]}/v1").run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}; give a number from 0 (any free one) to 65535.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise UserError(f"Nothing can listen on {host}:{port} ({error}); choose another --host or --port.") from error
