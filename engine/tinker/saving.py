"""Saved states as clients ask for them: saving, loading, and what there is."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from tinker.types import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

from ..fleet.rollouts import Rollouts
from .adapters import Lora
from .faults import FaultError, read
from .futures import Future, Futures, Reply
from .models import Models
from .sessions import Sampler, Session, Sessions, texts
from .store import Checkpoint, Store, stamp
from .training import Model
from .whole import Weights

EPHEMERAL_S = 24 * 3600
"""Seconds for which weights are kept that were saved for one sampling session."""


class Saving:
    """The saved states of a server."""

    def __init__(
        self,
        models: Models,
        store: Store,
        sessions: Sessions,
        futures: Futures,
        adapters: Weights,
        rollouts: Rollouts,
    ) -> None:
        self._models, self._store, self._sessions, self._futures = models, store, sessions, futures
        self._adapters, self._rollouts = adapters, rollouts

    def save_weights(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsRequest, raw)
        model = self._models.find(body.model_id, owner)

        async def save() -> Reply:
            saved = await self._save(model, "weights", body.path, body, optimizer=True, overwrite=body.overwrite)
            return {"type": "save_weights", "path": saved.path}

        return model.submit(body.seq_id, len(raw), save)

    def save_external(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsExternalRequest, raw)
        model = self._models.find(body.model_id, owner)

        async def save() -> Reply:
            if body.age_encryption_recipients:
                raise FaultError("age_encryption_recipients is not served; the files do not leave the server's disk.")
            saved = await self._save(model, "external_weights", body.path, body)
            return {"type": "save_weights_external", "path": saved.path}

        return model.submit(body.seq_id, len(raw), save)

    def save_for_sampler(self, owner: str, raw: bytes) -> Future:
        body = read(SaveWeightsForSamplerRequest, raw)
        model = self._models.find(body.model_id, owner)
        session = self._sessions.find(model.name.partition(":")[0], owner)

        async def save() -> Reply:
            if body.path is not None:
                saved = await self._save(model, "sampler_weights", body.path, body)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            if body.sampling_session_seq_id is None:
                raise FaultError("save_weights_for_sampler needs a path, or a sampling_session_seq_id.")
            saved = await self._save(model, "sampler_weights", None, body, ephemeral=True)
            inflight = model.name if body.kind == "inflight" else None
            if inflight is not None:
                self._models.published[inflight] = saved.path
            sampler = Sampler(saved.path, inflight)
            name = self._sessions.add_sampler(session, body.sampling_session_seq_id, sampler)
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
        writes = await self._rollouts.call(partial(model.writer, self._models.source, optimizer))

        def write(directory: Path) -> dict[str, Any]:
            return writes(directory) | {"ephemeral": ephemeral}

        save = partial(
            self._store.save,
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
            await self._adapters.forget(saved.place)
        return saved

    def load_weights(self, owner: str, raw: bytes) -> Future:
        body = read(LoadWeightsRequest, raw)
        if body.weights_access_token is not None:
            raise FaultError("weights_access_token is not served; states belong to the key that saved them.")
        if body.session_id is None:
            model = self._models.find(body.model_id, owner)
            return model.submit(body.seq_id, len(raw), partial(self._loaded, model, body))
        session = self._sessions.alive(body.session_id, owner)
        if body.model_seq_id is None or body.model_id is not None:
            raise FaultError("load_weights needs model_id with seq_id, or session_id with model_seq_id.")
        name = self._models.named(session, body.model_seq_id)
        return self._futures.once(name, owner, len(raw), self._created_of(session, name, body), model_id=name)

    async def _created_of(self, session: Session, name: str, body: LoadWeightsRequest) -> Reply:
        checkpoint = self._trainable(body, session.owner)
        self._models.check_optimizer(body.optimizer_config)
        model = await self._models.add(session, name, Lora(**checkpoint.meta["lora"]), body.user_metadata)
        try:
            return await self._loaded(model, body)
        except BaseException:
            await self._models.unload(model)
            raise

    async def _loaded(self, model: Model, body: LoadWeightsRequest) -> Reply:
        checkpoint = self._trainable(body, model.owner)
        saved, ours = checkpoint.meta["lora"], vars(model.lora)
        differ = [key for key in ours if key != "seed" and ours[key] != saved[key]]
        if differ:
            raise FaultError(
                f"The checkpoint has {differ[0]} {saved[differ[0]]}, and the model has {ours[differ[0]]}; create a "
                "model from the checkpoint."
            )
        await self._rollouts.call(partial(model.read, checkpoint.place, checkpoint.meta, body.optimizer))
        return {"type": "load_weights", "path": checkpoint.path, "model_id": model.name}

    def _trainable(self, body: LoadWeightsRequest, owner: str) -> Checkpoint:
        if body.base_model is not None:
            self._models.check_base(body.base_model)
        return self.weights(body.path, owner)

    def weights(self, path: str, owner: str) -> Checkpoint:
        """Return a checkpoint of this server's model."""
        checkpoint = self._store.find(path, owner)
        if checkpoint.meta["base_model"] not in (self._models.source, self._models.name):
            raise FaultError(
                f"The checkpoint is of '{checkpoint.meta['base_model']}', and this server has '{self._models.name}'."
            )
        self._models.check_rank(checkpoint.meta["lora"]["rank"])
        return checkpoint

    def for_sampling(self, owner: str) -> list[Checkpoint]:
        """Return what an owner has saved for sampling from this server's model, the newest first."""
        base = self._models.source, self._models.name
        runs = [run for run, _ in self._store.runs(owner)]
        saved = [one for run in runs for one in self._store.checkpoints(run) if one.kind == "sampler_weights"]
        usable = [one for one in saved if one.meta["base_model"] in base]
        return sorted(usable, key=lambda one: -one.meta["saved"])

    async def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, also from the module."""
        await self._adapters.forget(checkpoint.place)
        await asyncio.to_thread(self._store.delete, checkpoint)

    def run_facts(self, owner: str, run: str) -> dict[str, Any]:
        """Return the client's `TrainingRun`."""
        facts = self._store.run(run, owner)
        saved = self._store.checkpoints(run)
        last = {
            kind: next((c.described() for c in saved if c.kind == kind), None)
            for kind in ("weights", "sampler_weights")
        }
        newest = max([facts["created"], *(c.meta["saved"] for c in saved)])
        return {
            "training_run_id": run,
            "base_model": facts["base_model"],
            "model_owner": owner,
            "is_lora": facts["lora"]["rank"] > 0,
            "lora_rank": facts["lora"]["rank"] or None,
            "last_request_time": stamp(newest),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": texts(facts["user_metadata"]),
        }
