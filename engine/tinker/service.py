"""The work of each request of a client: sessions, training and sampling; `models` and `saving` have the rest.

Every method is called in the event loop with the owner, a digest of the key that the client sent. Ids of other owners
are answered like ids that do not exist.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from tinker.types import (
    AdamParams,
    CreateCustomLossRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    OptimStepRequest,
    SampleRequest,
)

from ..data.media import Picture
from ..fleet.rollouts import Rollouts
from ..rollout import NativeEngine
from .adapters import Adapters
from .faults import FaultError, read
from .futures import Future, Futures, Reply
from .graph import Graph
from .images import Images
from .losses import loss_of
from .models import Models
from .sampling import Sampling, params_of, read_prompt
from .saving import Saving
from .sessions import Sampler, Session, Sessions, texts
from .store import Store
from .training import Model
from .whole import Whole
from .wire import Envelope, read_batch, read_envelope

IDLE_S = 1800.0
"""Seconds without a sign of a session's client after which its models are unloaded."""
SWEEP_S = 30.0  # between looks for what has expired


class Service:
    """A training service.

    Args:
        engine: samples with the module that is trained.
        rollouts: runs functions and requests in the engine's thread.
        name: of the model, for clients.
        source: the model's directory, which clients may name too, and load the tokenizer from.
        root: directory of saved states.
        full: train all weights of one model in place of adapters of many.

    Raises:
        UserError: the directory cannot be used, or a package is missing.
    """

    def __init__(
        self, engine: NativeEngine, rollouts: Rollouts, name: str, source: str, root: Path, *, full: bool = False
    ) -> None:
        self.engine, self.name, self.source = engine, name, source
        self._rollouts = rollouts
        self.store = Store(root)
        self.sessions = Sessions(self.store)
        self.futures = Futures()
        self.adapters = Whole(engine, rollouts, source) if full else Adapters(engine, rollouts)
        assert engine.tokenizer is not None
        self.images = Images(engine.model, engine.tokenizer)
        self.sampling = Sampling(engine, rollouts, self.adapters)
        self.models = Models(name, source, self.store, self.sessions, self.futures, self.adapters, rollouts)
        self.saving = Saving(self.models, self.store, self.sessions, self.futures, self.adapters, rollouts)
        self.secret = secrets.token_bytes(32)  # signs the addresses of files
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to remove what expires; called in the running event loop."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def stop(self) -> None:
        """End what `start` began."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _sweep(self) -> None:
        while True:
            for checkpoint in await asyncio.to_thread(self.store.expired):
                await self.saving.delete(checkpoint)
            before = time.monotonic() - IDLE_S
            for session in [session for session in self.sessions.all.values() if session.beat < before]:
                await self.models.unload_of(session)
            await asyncio.sleep(SWEEP_S)

    def metrics(self) -> str:
        """Return the state of the service as text of Prometheus."""
        numbers = {
            "sessions": sum(not session.facts["finished"] for session in self.sessions.all.values()),
            "models": len(self.models.all),
            "resident_adapters": self.adapters.resident,
            "waiting_requests": self.futures.waiting,
            "waiting_bytes": self.futures.held_bytes,
        }
        lines = [f"# TYPE rolltree_{name} gauge\nrolltree_{name} {value}" for name, value in numbers.items()]
        lines.append("# TYPE rolltree_requests_total counter")
        for kind in ("ok", "user", "server"):
            lines.append(f'rolltree_requests_total{{result="{kind}"}} {self.futures.answered[kind]}')
        return "\n".join([*lines, ""])

    # -- sessions -----------------------------------------------------------------------------------------------------

    def create_session(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read(CreateSessionRequest, raw)
        session = self.sessions.create(owner, body.user_metadata, body.display_name)
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, owner: str, name: str) -> dict[str, Any]:
        session = self.sessions.alive(name, owner)
        session.beat = time.monotonic()
        return {"type": "session_heartbeat"}

    async def finish(self, owner: str, name: str) -> dict[str, Any]:
        """End a session: its models are unloaded, and weights that were saved for its samplers alone are deleted."""
        session = self.sessions.find(name, owner)
        session.facts["finished"] = True
        self.sessions.keep(session)
        await self.models.unload_of(session)
        for sampler in session.samplers.values():
            if sampler.path is not None:
                try:
                    checkpoint = self.store.find(sampler.path, owner)
                except FaultError:
                    continue
                if checkpoint.meta.get("ephemeral"):
                    await self.saving.delete(checkpoint)
        return {}

    def session_facts(self, owner: str, name: str) -> dict[str, Any]:
        session = self.sessions.find(name, owner)
        runs = [run for run, _ in self.store.runs(owner) if run.startswith(f"{name}:")]
        return {
            "training_run_ids": runs,
            "sampler_ids": list(session.samplers),
            "user_metadata": texts(session.facts["user_metadata"]),
            "display_name": session.facts["display_name"],
        }

    # -- training -----------------------------------------------------------------------------------------------------

    def forward_backward(self, owner: str, raw: bytes) -> Future:
        envelope = read_envelope(raw)
        model = self.models.find(envelope.model_id, owner)
        session = self.sessions.find(envelope.model_id.partition(":")[0], owner)
        return model.submit(envelope.seq_id, len(raw), partial(self._computed, model, session, envelope))

    async def _computed(self, model: Model, session: Session, envelope: Envelope) -> Reply:
        engine = self.engine
        batch = await asyncio.to_thread(read_batch, envelope, engine.vocabulary, engine.longest, self.images)
        loss = await asyncio.to_thread(loss_of, batch, session.graphs)
        return await model.compute(batch, loss)

    def optim_step(self, owner: str, raw: bytes) -> Future:
        body = read(OptimStepRequest, raw)
        model, params = self.models.find(body.model_id, owner), body.optim_params

        async def step() -> Reply:
            if not isinstance(params, AdamParams):
                raise FaultError(f"The optimiser '{params.type}' is not served; give AdamParams.")
            return await model.step(params)

        return model.submit(body.seq_id, len(raw), step)

    def create_custom_loss(self, owner: str, raw: bytes) -> Future:
        body = read(CreateCustomLossRequest, raw)
        session = self.sessions.alive(body.session_id, owner)
        name = f"{session.id}:loss:{body.custom_loss_seq_id}"

        async def create() -> Reply:
            inputs = [(one.name, one.rank) for one in body.inputs]
            session.graphs[name] = Graph(body.name, inputs, body.graph)
            return {"type": "create_custom_loss", "loss_id": name}

        return self.futures.once(name, owner, len(raw), create())

    # -- sampling -----------------------------------------------------------------------------------------------------

    def create_sampler(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read(CreateSamplingSessionRequest, raw)
        session = self.sessions.alive(body.session_id, owner)
        if body.model_path is not None:
            self.saving.weights(body.model_path, owner)
        elif body.base_model is None:
            raise FaultError("A sampling session needs base_model or model_path.")
        if body.base_model is not None:
            self.models.check_base(body.base_model)
        name = self.sessions.add_sampler(session, body.sampling_session_seq_id, Sampler(body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def join_sampler(self, owner: str, name: str) -> dict[str, Any]:
        sampler = self.sessions.sampler(name, owner)
        sampler.clones += 1
        self.sessions.keep(self.sessions.find(name.partition(":")[0], owner))
        return {"type": "join_sampling_session", "client_counter": sampler.clones}

    def sampler_facts(self, owner: str, name: str) -> dict[str, Any]:
        """Return the client's `GetSamplerResponse`."""
        sampler = self.sessions.sampler(name, owner)
        return {"sampler_id": name, "base_model": self.name, "model_path": sampler.path}

    async def sample(self, owner: str, raw: bytes) -> Future:
        vocabulary = self.engine.vocabulary

        def parsed() -> tuple[SampleRequest, list[int], tuple[Picture, ...]]:
            body = read(SampleRequest, raw)
            if body.sampling_session_id is None or body.seq_id is None:
                raise FaultError("asample needs sampling_session_id and seq_id; create a sampling session first.")
            return body, *read_prompt(body.prompt, vocabulary, self.images)

        body, ids, pictures = await asyncio.to_thread(parsed)
        sampler = self.sessions.sampler(body.sampling_session_id, owner)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        if (earlier := self.futures.find(request_id, owner)) is not None:
            return earlier
        path = sampler.path if sampler.inflight is None else self.models.published.get(sampler.inflight, sampler.path)
        weights = None if path is None else self.saving.weights(path, owner)
        params = params_of(body, self.engine.room(len(ids)), len(ids), vocabulary)
        names = [f"{request_id}:{i}" for i in range(body.num_samples)]
        future = self.futures.open(request_id, owner, len(raw), sample_sequence_ids=names)
        self.futures.start(future, self.sampling.sample(body, ids, pictures, params, weights))
        return future
