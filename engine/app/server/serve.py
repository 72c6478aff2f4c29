"""`rolltree serve`: a model, its engine and its server in one process, which ends soon after SIGTERM or SIGINT."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from ...chat.ends import unlisted_end
from ...errors import UserError
from ...model.loading import choose_device, load_model, load_tokenizer
from ...openmp import release_threads
from ...protocols.keys import VARIABLE, check_key
from ...rollout import EngineConfig, NativeEngine
from ...rollout.equal_bits import check_sampler
from .app import make_app

GRACE_S = 2
"""Seconds after the signal until unfinished answers are cut off."""
END_S = 4.0
"""Seconds after the signal until the process ends, even if something in it hangs."""


class Server(uvicorn.Server):
    """Prints its address, and ends within `END_S` seconds of SIGTERM or SIGINT."""

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
    path: str,
    *,
    name: str | None,
    host: str,
    port: int,
    api_key: str | None,
    dtype: str,
    device: str,
    kv_tokens: int,
    debug: bool,
    batch_invariant: bool = False,
    tinker: Path | None = None,
    tinker_full: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        path: Hugging Face directory of the model.
        name: name of the model for clients; None: the directory's name.
        host: address to listen on.
        port: port to listen on; 0: any free one.
        api_key: key that clients must send; None: `keys.VARIABLE` of the environment, or none if that is not set.
        dtype: number type of the model, such as "bfloat16".
        device: "auto", "cpu" or "cuda".
        kv_tokens: capacity of the KV cache, in tokens.
        debug: log all requests.
        batch_invariant: give a token's log-prob the same bits whatever is served beside it (docs/exactness.md).
        tinker: directory of what a training service with Tinker's API keeps; None: no such service.
        tinker_full: it trains all weights of one model in place of adapters.

    Raises:
        UserError: the model, its tokenizer, the sizes, the address or the key cannot be used, the address is not a
            loopback one and there is no key, or the model is not batch-invariant and should be.
    """
    try:
        config = EngineConfig(kv_tokens=kv_tokens)
    except ValueError as error:
        raise UserError(str(error)) from error
    api_key = os.environ.get(VARIABLE) if api_key is None else api_key
    listening = _listen(host, port)
    check_key(api_key, listening)
    if tinker is not None and api_key is not None and not api_key.startswith("tml-"):
        raise UserError("Tinker's client sends no key that does not begin with 'tml-'; give --api_key one that does.")
    if tinker_full and (tinker is None or dtype != "float32"):
        raise UserError("--tinker_full needs --tinker, and --dtype float32, in which all weights are trained.")
    if tinker is not None and batch_invariant:
        raise UserError("--batch_invariant does not hold for the adapters of --tinker yet; leave one of them out.")
    tokenizer = load_tokenizer(path)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes this of a directory without a tokenizer
        raise UserError(f"'{path}' has no tokenizer, which a server needs; save the tokenizer in the same directory.")
    model = load_model(path, dtype=getattr(torch, dtype), device=choose_device(device), batch_invariant=batch_invariant)
    if batch_invariant:
        check_sampler(model)
    if said := unlisted_end(tokenizer, model.generation_config, model.config.get_text_config()):
        print(f"rolltree: {said}", file=sys.stderr, flush=True)
    engine, name = NativeEngine(model, tokenizer, config), name or Path(path).resolve().name
    training = None
    if tinker is not None:
        from ...tinker.serving import training_of

        training = training_of(engine, name, str(Path(path).resolve()), tinker, full=tinker_full)
    app = make_app(engine, name, api_key=api_key, training=training)
    level = "debug" if debug else "warning"
    settings = uvicorn.Config(app, log_level=level, timeout_graceful_shutdown=GRACE_S)
    address = f"[{host}]" if ":" in host else host
    release_threads()  # the engine computes in a thread of its own
    Server(settings, f"http://{address}:{listening.getsockname()[1]}/v1").run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}; give a number from 0 (any free one) to 65535.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise UserError(f"Cannot listen on {host}:{port} ({error}); choose another --host or --port.") from error
