"""An engine with an adapter in training, a server of it, and the client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn

pytest.importorskip("tinker", reason="Tinker's client is not installed: pip install rolltree[tinker]")
pytest.importorskip("peft", reason="peft is not installed: pip install rolltree[tinker]")

os.environ["TINKER_TELEMETRY"] = "0"  # a client would go on sending it, with retries, to servers that ended

import tinker
from tinker import types

from rolltree.engine.app.server import make_app
from rolltree.engine.rollout import NativeEngine
from rolltree.engine.tinker.adapters import Adapters, Lora
from rolltree.engine.tinker.serving import training_of
from rolltree.engine.tinker.wire import Array, Datum

from ...support.serving import make_engine

KEY = "tml-tests"
CLIENTS: dict[str, list[tinker.ServiceClient | tinker.RestClient]] = {}
"""The clients of the servers that run, by their URLs."""


def adapted(lora: Lora | None = None) -> tuple[NativeEngine, Adapters, str]:
    """An engine, and an adapter in it whose two sides both differ from zero."""
    engine = make_engine()
    adapters = Adapters(engine, None)  # type: ignore[arg-type]  # nothing is lent here
    name = adapters.create(lora or Lora(rank=4, seed=3))
    randomize(adapters, name)
    return engine, adapters, name


def randomize(adapters: Adapters, name: str) -> None:
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapters.parameters(name).values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=drawn))


def datum(tokens: list[int], target: Array, **inputs: Array) -> Datum:
    return Datum(np.array(tokens, np.int32), {"target_tokens": target, **inputs})


@contextmanager
def serving(
    root: Path, engine: NativeEngine | None = None, source: str = "/models/tiny", full: bool = False, **options: Any
) -> Iterator[str]:
    """A server's URL; clients load the tokenizer from the directory ``source``.

    Args:
        full: it trains all weights of one model.
    """
    engine = engine or make_engine()
    app = make_app(engine, "tiny", training=training_of(engine, "tiny", source, root, full=full), **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield url
    finally:
        close_clients(url)
        server.should_exit = server.force_exit = True
        thread.join(10)


def client(url: str, key: str = KEY) -> tinker.ServiceClient:
    made = tinker.ServiceClient(base_url=url, api_key=key)
    CLIENTS.setdefault(url, []).append(made)
    return made


def rest_client(url: str, key: str = KEY) -> tinker.RestClient:
    made = tinker.RestClient(base_url=url, api_key=key)
    CLIENTS.setdefault(url, []).append(made)
    return made


def close_clients(url: str) -> None:
    """End all that a server's clients do in the background.

    Their heartbeats and retries would go on in later tests, log failures there and draw from Python's generator.
    """
    for made in CLIENTS.pop(url, []):
        close(made)


def close(made: Any) -> None:
    """End a client's background tasks, and wait until they ended."""
    own = (made._session_holder, made._rest_holder) if isinstance(made, tinker.ServiceClient) else (made.holder,)
    for holder in own:
        if holder is not None:
            holder.run_coroutine_threadsafe(holder.aclose()).result(30)


def downloaded(url: str, trained: tinker.TrainingClient, to: Path) -> Path:
    """The directory ``to`` with the files of a model's weights, as a client downloads them."""
    to.mkdir()
    path = trained.save_weights_external(to.name).result().path
    found = rest_client(url).get_external_weights_urls(path).result()
    for name, address in found.urls.items():
        (to / name).write_bytes(httpx.get(address).content)
    return to


def tokens(ids: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(ids)


def example(ids: list[int], trained: int, **inputs: Any) -> types.Datum:
    """A datum of cross entropy on the last ``trained`` of ``ids``."""
    weights = [0.0] * (len(ids) - 1 - trained) + [1.0] * trained
    return types.Datum(
        model_input=tokens(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], "weights": weights, **inputs}
    )
