"""The training service as a part of `rolltree serve`: its endpoints, and its saved adapters as models of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response

from ..fleet.rollouts import Rollouts
from ..protocols.http import RefusedError
from ..rollout import NativeEngine
from .adapters import Lora
from .faults import FaultError
from .routes import add_routes, owner_of
from .service import Service
from .store import SCHEME, Checkpoint


def training_of(
    engine: NativeEngine, name: str, source: str, root: Path, *, full: bool = False
) -> Callable[[FastAPI, Rollouts], ServedTraining]:
    """Return a function that adds the training service of an engine to a server.

    Args:
        name: of the model, for clients.
        source: the model's directory, which clients load the tokenizer from.
        root: directory of saved states.
        full: train all weights of one model. OpenAI's endpoints are refused then, because the engine's weights change
            with the requests that sample.
    """

    def add(app: FastAPI, rollouts: Rollouts) -> ServedTraining:
        service = Service(engine, rollouts, name, source, root, full=full)
        add_routes(app, service)
        if full:
            app.add_api_route("/v1/{rest:path}", _refuse, methods=["GET", "POST"])
        return ServedTraining(service)

    return add


class ServedTraining:
    """The training service of a server.

    An adapter's name as a model is the path of a saved state, or the name that it was saved by for sampling, which
    means the newest of this name.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Remove what expires, in a with-block."""
        self._service.start()
        yield
        self._service.stop()

    def models(self, key: bytes) -> list[str]:
        """Return the paths of the states that the sender of a key has saved for sampling, the newest first."""
        return [checkpoint.path for checkpoint in self._service.saving.for_sampling(owner_of(key))]

    def knows(self, model: str, key: bytes) -> bool:
        """Return whether the sender of a key has a saved adapter."""
        try:
            self._find(model, key)
        except FaultError:
            return False
        return True

    async def lend(self, model: str, key: bytes) -> tuple[str | None, Callable[[], None]]:
        """Return the engine's name of a saved adapter, and the function that ends its use.

        Raises:
            FaultError: the sender of the key has no such adapter.
        """
        checkpoint = self._find(model, key)
        return await self._service.adapters.lend(checkpoint.place, Lora(**checkpoint.meta["lora"]))

    def _find(self, model: str, key: bytes) -> Checkpoint:
        saving, owner = self._service.saving, owner_of(key)
        if not model.startswith(SCHEME):
            model = next((one.path for one in saving.for_sampling(owner) if one.name == model), model)
        return saving.weights(model, owner)


async def _refuse(http: Request) -> Response:
    raise RefusedError(f"{http.url.path} is not served with --tinker_full, which samples by Tinker's API alone.", 404)
