"""The training service as a part of `rolltree serve`: its endpoints, and what runs while the server does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from ..fleet.rollouts import Rollouts
from ..rollout import NativeEngine
from .routes import add_routes
from .service import Service


def training_of(
    engine: NativeEngine, name: str, source: str, root: Path
) -> Callable[[FastAPI, Rollouts], Callable[[], AbstractAsyncContextManager[None]]]:
    """Return a function that adds the training service of an engine to a server.

    Args:
        name: of the model, for clients.
        source: the model's directory, which clients load the tokenizer from.
        root: directory of saved states.
    """

    def add(app: FastAPI, rollouts: Rollouts) -> Callable[[], AbstractAsyncContextManager[None]]:
        service = Service(engine, rollouts, name, source, root)
        add_routes(app, service)

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            service.start()
            yield
            service.stop()

        return running

    return add
