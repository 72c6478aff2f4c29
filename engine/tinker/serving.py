"""The training service as a part of `rolltree serve`: its endpoints, and what runs while the server does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response

from ..fleet.rollouts import Rollouts
from ..protocols.http import RefusedError
from ..rollout import NativeEngine
from .routes import add_routes
from .service import Service


def training_of(
    engine: NativeEngine, name: str, source: str, root: Path, *, full: bool = False
) -> Callable[[FastAPI, Rollouts], Callable[[], AbstractAsyncContextManager[None]]]:
    """Return a function that adds the training service of an engine to a server.

    Args:
        name: of the model, for clients.
        source: the model's directory, which clients load the tokenizer from.
        root: directory of saved states.
        full: train all weights of one model. OpenAI's endpoints are refused then, because the engine's weights change
            with the requests that sample.
    """

    def add(app: FastAPI, rollouts: Rollouts) -> Callable[[], AbstractAsyncContextManager[None]]:
        service = Service(engine, rollouts, name, source, root, full=full)
        add_routes(app, service)
        if full:
            app.add_api_route("/v1/{rest:path}", _refuse, methods=["GET", "POST"])

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            service.start()
            yield
            service.stop()

        return running

    return add


async def _refuse(http: Request) -> Response:
    raise RefusedError(f"{http.url.path} is not served with --tinker_full, which samples by Tinker's API alone.", 404)
