"""What each request of a client does: sessions, models, training, sampling, saved states.

Every method is called in the event loop with the owner, a digest of the key that the client sent. Ids of other owners
are answered like ids that do not exist.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tinker.types import (
    AdamParams,
    CreateCustomLossRequest,
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SampleRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

from ..fleet.rollouts import Rollouts
from ..rollout import NativeEngine
from .adapters import MOST_RANK, Adapters, Lora
from .faults import FaultError, read
from .futures import Future, Futures, Reply
from .graph import Graph
from .losses import loss_of
from .sampling import Sampling, params_of, token_ids
from .sessions import Sampler, Session, Sessions
from .store import Checkpoint, Store, stamp
from .training import Model, new_trainer
from .wire import Envelope, read_batch, read_envelope

MOST_MODELS = 64
"""Most models in training at once."""
IDLE_S = 1800.0
"""Seconds without a sign of a session's client after which its models are unloaded."""
EPHEMERAL_S = 24 * 3600
"""Seconds for which weights are kept that were saved for one sampling session."""
SWEEP_S = 30.0  # between looks for what has expired


class Service:
    """A training service.

    Args:
        engine: samples with the module that is trained.
        rollouts: runs functions and requests in the engine's thread.
        name: of the model, for clients.
        source: the model's directory, which clients may name too, and load the tokenizer from.
        root: directory of saved states.

    Raises:
        UserError: the directory cannot be used, or a package is missing.
    """

    def __init__(self, engine: NativeEngine, rollouts: Rollouts, name: str, source: str, root: Path) -> None:
        self.engine, self.name, self.source = engine, name, source
        self._rollouts = rollouts
        self.store = Store(root)
        self.sessions = Sessions(self.store)
        self.futures = Futures()
        self.adapters = Adapters(engine, rollouts)
        self.sampling = Sampling(engine, rollouts, self.adapters)
        self.models: dict[str, Model] = {}
        self._published: dict[str, str] = {}  # by model, the path of its newest weights in flight
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
                await self._delete(checkpoint)
            before = time.monotonic() - IDLE_S
            for session in [session for session in self.sessions.all.values() if session.beat < before]:
                await self._unload_models(session)
            await asyncio.sleep(SWEEP_S)

    def metrics(self) -> str:
        """Return the state of the service as text of Prometheus."""
        numbers = {
            "sessions": sum(not session.facts["finished"] for session in self.sessions.all.values()),
            "models": len(self.models),
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
        session = self._alive(name, owner)
        session.beat = time.monotonic()
        return {"type": "session_heartbeat"}

    def _alive(self, name: str, owner: str) -> Session:
        session = self.sessions.find(name, owner)
        if session.facts["finished"]:
            raise FaultError(f"Session '{name}' has finished.", 410)
        return session

    async def finish(self, owner: str, name: str) -> dict[str, Any]:
        """End a session: its models are unloaded, and weights that were saved for its samplers alone are deleted."""
        session = self.sessions.find(name, owner)
        session.facts["finished"] = True
        self.sessions.keep(session)
        await self._unload_models(session)
        for sampler in session.samplers.values():
            if sampler.path is not None:
                try:
                    checkpoint = self.store.find(sampler.path, owner)
                except FaultError:
                    continue
                if checkpoint.meta.get("ephemeral"):
                    await self._delete(checkpoint)
        return {}

    async def _unload_models(self, session: Session) -> None:
        for model in [model for model in self.models.values() if model.name.startswith(f"{session.id}:")]:
            await self._unload(model)

    def session_facts(self, owner: str, name: str) -> dict[str, Any]:
        session = self.sessions.find(name, owner)
        runs = [run for run, _ in self.store.runs(owner) if run.startswith(f"{name}:")]
        return {
            "training_run_ids": runs,
            "sampler_ids": list(session.samplers),
            "user_metadata": _texts(session.facts["user_metadata"]),
            "display_name": session.facts["display_name"],
        }

    # -- models -------------------------------------------------------------------------------------------------------

    def create_model(self, owner: str, raw: bytes) -> Future:
        body = read(CreateModelRequest, raw)
        session = self._alive(body.session_id, owner)
        name = self._model_name(session, body.model_seq_id)
        return self._once(name, owner, len(raw), self._created(session, name, body), model_id=name)

    def _model_name(self, session: Session, seq_id: int) -> str:
        if not 0 <= seq_id < 10**9:
            raise FaultError(f"model_seq_id is {seq_id}; number the models of a session from 0 on.")
        return f"{session.id}:train:{seq_id}"

    def _once(self, name: str, owner: str, size: int, work: Any, **extra: Any) -> Future:
        """Return the future of a request without a place in an order, which is begun unless it was before."""
        known = self.futures.known(f"{name}:0", owner)
        if known is not None:
            work.close()
            return known
        try:
            future = self.futures.open(f"{name}:0", owner, size, **extra)
        except FaultError:
            work.close()
            raise
        self.futures.start(future, work)
        return future

    async def _created(self, session: Session, name: str, body: CreateModelRequest) -> Reply:
        self._check_base(body.base_model)
        if body.lora_config is None:
            raise FaultError("This server trains adapters alone; give a lora_config.")
        self._check_optimizer(body.optimizer_config)
        asked = body.lora_config
        if not 1 <= asked.rank <= MOST_RANK:
            raise FaultError(f"rank is {asked.rank}; give 1 to {MOST_RANK}.")
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        if not -(2**63) <= seed < 2**63:
            raise FaultError(f"seed is {seed}; give one of 64 bits.")
        lora = Lora(asked.rank, seed, asked.train_attn, asked.train_mlp, asked.train_unembed)
        await self._add_model(session, name, lora, body.user_metadata)
        return {"type": "create_model", "model_id": name}

    async def _add_model(
        self, session: Session, name: str, lora: Lora, user_metadata: Mapping[str, Any] | None
    ) -> Model:
        if len(self.models) >= MOST_MODELS:
            raise FaultError(f"The server trains {MOST_MODELS} models already; close a session with models of its own.")

        def made() -> tuple[str, Any]:
            adapter = self.adapters.create(lora)
            return adapter, new_trainer(self.adapters, adapter)

        adapter, trainer = await self._rollouts.call(made)
        facts = {
            "owner": session.owner,
            "base_model": self.name,
            "lora": vars(lora),
            "user_metadata": dict(user_metadata or {}),
            "created": self.store.clock(),
        }
        self.store.write_run(name, facts)
        model = Model(name, session.owner, lora, adapter, trainer, self.adapters, self._rollouts, self.futures, facts)
        self.models[name] = model
        return model

    def _check_base(self, name: str) -> None:
        if name not in (self.name, self.source):
            raise FaultError(f"There is no model '{name[:200]}' here; this server has '{self.name}'.", 404)

    def _check_optimizer(self, config: Any) -> None:
        if config is not None and config.type != "adamw":
            raise FaultError(f"The optimiser '{config.type}' is not served; leave it out for AdamW.")

    def model(self, name: str | None, owner: str) -> Model:
        """Return a model in training.

        Raises:
            FaultError: there is none of that name and owner.
        """
        found = None if name is None else self.models.get(name)
        if found is None or found.owner != owner:
            raise FaultError(
                f"There is no model '{str(name)[:80]}' in training; one whose server has ended goes on from a saved "
                "state.",
                404,
            )
        self.sessions.find(found.name.partition(":")[0], owner).beat = time.monotonic()
        return found

    def info(self, owner: str, name: str) -> dict[str, Any]:
        model = self.model(name, owner)
        return {
            "type": "get_info",
            "model_data": {
                "arch": type(self.engine.model).__name__,
                "model_name": self.name,
                "tokenizer_id": self.source,
            },
            "model_id": name,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": self.name,
        }

    def unload_model(self, owner: str, name: str, size: int) -> Future:
        model = self.model(name, owner)
        future = self.futures.open(f"{name}:unload", owner, size, model_id=name)

        async def unload() -> Reply:
            await self._unload(model)
            return {"type": "unload_model", "model_id": name}

        self.futures.start(future, unload())
        return future

    async def _unload(self, model: Model) -> None:
        if self.models.pop(model.name, None) is not None:
            self._published.pop(model.name, None)
            await model.close()

    # -- training -----------------------------------------------------------------------------------------------------

    def forward_backward(self, owner: str, raw: bytes) -> Future:
        envelope = read_envelope(raw)
        model = self.model(envelope.model_id, owner)
        session = self.sessions.find(envelope.model_id.partition(":")[0], owner)
        return model.submit(envelope.seq_id, len(raw), partial(self._computed, model, session, envelope))

    async def _computed(self, model: Model, session: Session, envelope: Envelope) -> Reply:
        batch = await asyncio.to_thread(read_batch, envelope, self.engine.vocabulary, self.engine.longest)
        loss = await asyncio.to_thread(loss_of, batch, session.graphs)
        return await model.compute(batch, loss)

    def optim_step(self, owner: str, raw: bytes) -> Future:
        body = read(OptimStepRequest, raw)
        model, params = self.model(body.model_id, owner), body.optim_params

        async def step() -> Reply:
            if not isinstance(params, AdamParams):
                raise FaultError(f"The optimiser '{params.type}' is not served; give AdamParams.")
            return await model.step(params)

        return model.submit(body.seq_id, len(raw), step)

    def create_custom_loss(self, owner: str, raw: bytes) -> Future:
        body = read(CreateCustomLossRequest, raw)
        session = self._alive(body.session_id, owner)
        name = f"{session.id}:loss:{body.custom_loss_seq_id}"

        async def create() -> Reply:
            inputs = [(one.name, one.rank) for one in body.inputs]
            session.graphs[name] = Graph(body.name, inputs, body.graph)
            return {"type": "create_custom_loss", "loss_id": name}

        return self._once(name, owner, len(raw), create())

    # -- saved states -------------------------------------------------------------------------------------------------

    def save_weights(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsRequest, raw)
        model = self.model(body.model_id, owner)

        async def save() -> Reply:
            saved = await self._save(model, "weights", body.path, body, optimizer=True, overwrite=body.overwrite)
            return {"type": "save_weights", "path": saved.path}

        return model.submit(body.seq_id, len(raw), save)

    def save_external(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsExternalRequest, raw)
        model = self.model(body.model_id, owner)

        async def save() -> Reply:
            if body.age_encryption_recipients:
                raise FaultError("age_encryption_recipients is not served; the files do not leave the server's disk.")
            saved = await self._save(model, "external_weights", body.path, body)
            return {"type": "save_weights_external", "path": saved.path}

        return model.submit(body.seq_id, len(raw), save)

    def save_for_sampler(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsForSamplerRequest, raw)
        model = self.model(body.model_id, owner)
        session = self.sessions.find(model.name.partition(":")[0], owner)

        async def save() -> Reply:
            if body.path is not None:
                saved = await self._save(model, "sampler_weights", body.path, body)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            if body.sampling_session_seq_id is None:
                raise FaultError("save_weights_for_sampler needs a path, or a sampling_session_seq_id.")
            saved = await self._save(model, "sampler_weights", None, body, ephemeral=True)
            inflight = model.name if body.kind == "inflight" else None
            if inflight is not None:
                self._published[inflight] = saved.path
            sampler = Sampler(saved.path, inflight)
            name = self.sessions.add_sampler(session, body.sampling_session_seq_id, sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": name}

        return model.submit(body.seq_id, len(raw), save)

    async def _save(
        self,
        model: Model,
        kind: str,
        name: str | None,
        body: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        *,
        optimizer: bool = False,
        overwrite: bool = False,
        ephemeral: bool = False,
    ) -> Checkpoint:
        writes = await self._rollouts.call(partial(model.writer, self.source, optimizer))

        def write(directory: Path) -> dict[str, Any]:
            return writes(directory) | {"ephemeral": ephemeral}

        save = partial(
            self.store.save,
            model.name,
            kind,
            name,
            write,
            ttl=EPHEMERAL_S if ephemeral else body.ttl_seconds,
            user_metadata=getattr(body, "user_metadata", None),
            overwrite=overwrite,
        )
        saved = await asyncio.to_thread(save)
        if overwrite:
            await self.adapters.forget(saved.place)
        return saved

    def load_weights(self, owner: str, raw: bytes) -> Future:
        body = read(LoadWeightsRequest, raw)
        if body.weights_access_token is not None:
            raise FaultError("weights_access_token is not served; states belong to the key that saved them.")
        if body.session_id is None:
            model = self.model(body.model_id, owner)
            return model.submit(body.seq_id, len(raw), partial(self._loaded, model, body))
        session = self._alive(body.session_id, owner)
        if body.model_seq_id is None or body.model_id is not None:
            raise FaultError("load_weights needs model_id with seq_id, or session_id with model_seq_id.")
        name = self._model_name(session, body.model_seq_id)
        return self._once(name, owner, len(raw), self._created_of(session, name, body), model_id=name)

    async def _created_of(self, session: Session, name: str, body: LoadWeightsRequest) -> Reply:
        checkpoint = self._trainable(body, session.owner)
        self._check_optimizer(body.optimizer_config)
        model = await self._add_model(session, name, Lora(**checkpoint.meta["lora"]), body.user_metadata)
        try:
            return await self._loaded(model, body)
        except BaseException:
            await self._unload(model)
            raise

    async def _loaded(self, model: Model, body: LoadWeightsRequest) -> Reply:
        checkpoint = self._trainable(body, model.owner)
        theirs, ours = checkpoint.meta["lora"], vars(model.lora)
        differ = [key for key in ours if key != "seed" and ours[key] != theirs[key]]
        if differ:
            raise FaultError(
                f"The checkpoint has {differ[0]} {theirs[differ[0]]}, and the model has {ours[differ[0]]}; create a "
                "model from the checkpoint."
            )
        await self._rollouts.call(partial(model.read, checkpoint.place, checkpoint.meta, body.optimizer))
        return {"type": "load_weights", "path": checkpoint.path, "model_id": model.name}

    def _trainable(self, body: LoadWeightsRequest, owner: str) -> Checkpoint:
        if body.base_model is not None:
            self._check_base(body.base_model)
        return self._weights(body.path, owner)

    def _weights(self, path: str, owner: str) -> Checkpoint:
        """Return a checkpoint of this server's model."""
        checkpoint = self.store.find(path, owner)
        if checkpoint.meta["base_model"] not in (self.source, self.name):
            raise FaultError(
                f"The checkpoint is of '{checkpoint.meta['base_model']}', and this server has '{self.name}'."
            )
        return checkpoint

    async def _delete(self, checkpoint: Checkpoint) -> None:
        await self.adapters.forget(checkpoint.place)
        await asyncio.to_thread(self.store.delete, checkpoint)

    async def delete_checkpoint(self, owner: str, path: str) -> None:
        await self._delete(self.store.find(path, owner))

    def run_facts(self, owner: str, run: str) -> dict[str, Any]:
        """Return the client's `TrainingRun`."""
        facts = self.store.run(run, owner)
        saved = self.store.checkpoints(run)
        last = {
            kind: next((c.described() for c in saved if c.kind == kind), None)
            for kind in ("weights", "sampler_weights")
        }
        newest = max([facts["created"], *(c.meta["saved"] for c in saved)])
        return {
            "training_run_id": run,
            "base_model": facts["base_model"],
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": facts["lora"]["rank"],
            "last_request_time": stamp(newest),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": _texts(facts["user_metadata"]),
        }

    # -- sampling -----------------------------------------------------------------------------------------------------

    def create_sampler(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read(CreateSamplingSessionRequest, raw)
        session = self._alive(body.session_id, owner)
        if body.model_path is not None:
            self._weights(body.model_path, owner)
        elif body.base_model is None:
            raise FaultError("A sampling session needs base_model or model_path.")
        if body.base_model is not None:
            self._check_base(body.base_model)
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
        body = await asyncio.to_thread(read, SampleRequest, raw)
        if body.sampling_session_id is None or body.seq_id is None:
            raise FaultError("asample needs sampling_session_id and seq_id; create a sampling session first.")
        sampler = self.sessions.sampler(body.sampling_session_id, owner)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        if (known := self.futures.known(request_id, owner)) is not None:
            return known
        path = sampler.path if sampler.inflight is None else self._published.get(sampler.inflight, sampler.path)
        weights = None if path is None else self._weights(path, owner)
        vocabulary = self.engine.vocabulary
        ids = token_ids(body.prompt, vocabulary)
        params = params_of(body, self.engine.room(len(ids)), len(ids), vocabulary)
        names = [f"{request_id}:{i}" for i in range(body.num_samples)]
        future = self.futures.open(request_id, owner, len(raw), sample_sequence_ids=names)
        self.futures.start(future, self.sampling.sample(body, ids, params, weights))
        return future


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (values or {}).items()}
