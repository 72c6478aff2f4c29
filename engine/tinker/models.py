"""The models in training of all clients: made, found by their ids, and unloaded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from tinker.types import CreateModelRequest, LoraConfig

from ..fleet.rollouts import Rollouts
from .adapters import MOST_RANK, Lora
from .faults import FaultError, read
from .futures import Future, Futures, Reply
from .sessions import Session, Sessions
from .store import Store
from .training import Model, new_trainer
from .whole import Weights, Whole

MOST_MODELS = 64
"""Most models in training at once."""


class Models:
    """The models of a server.

    Args:
        name: of the base model, for clients.
        source: its directory, which clients may name too, and load the tokenizer from.

    Attributes:
        all: the models by their ids.
        published: by model, the path of its newest weights in flight.
    """

    def __init__(
        self,
        name: str,
        source: str,
        store: Store,
        sessions: Sessions,
        futures: Futures,
        adapters: Weights,
        rollouts: Rollouts,
    ) -> None:
        self.name, self.source = name, source
        self._store, self._sessions, self._futures = store, sessions, futures
        self._adapters, self._rollouts = adapters, rollouts
        self.all: dict[str, Model] = {}
        self.published: dict[str, str] = {}

    def create(self, owner: str, raw: bytes) -> Future:
        body = read(CreateModelRequest, raw)
        session = self._sessions.alive(body.session_id, owner)
        name = self.named(session, body.model_seq_id)
        return self._futures.once(name, owner, len(raw), self._created(session, name, body), model_id=name)

    def named(self, session: Session, seq_id: int) -> str:
        """Return the name of a session's model."""
        if not 0 <= seq_id < 10**9:
            raise FaultError(f"model_seq_id is {seq_id}; number the models of a session from 0 on.")
        return f"{session.id}:train:{seq_id}"

    async def _created(self, session: Session, name: str, body: CreateModelRequest) -> Reply:
        if name in self.all:  # asked for again long after it was made
            return {"type": "create_model", "model_id": name}
        self.check_base(body.base_model)
        self.check_optimizer(body.optimizer_config)
        config = body.lora_config or LoraConfig(rank=0)
        self.check_rank(config.rank)
        if config.rank == 0 and not (config.train_attn and config.train_mlp and config.train_unembed):
            raise FaultError("rank 0 trains all weights; leave train_attn, train_mlp and train_unembed on.")
        seed = secrets.randbits(31) if config.seed is None else config.seed
        if not -(2**63) <= seed < 2**63:
            raise FaultError(f"seed is {seed}; give one of 64 bits.")
        lora = Lora(config.rank, seed, config.train_attn, config.train_mlp, config.train_unembed)
        await self.add(session, name, lora, body.user_metadata)
        return {"type": "create_model", "model_id": name}

    async def add(self, session: Session, name: str, lora: Lora, user_metadata: Mapping[str, Any] | None) -> Model:
        """Make a model.

        Raises:
            FaultError: it cannot be made, or there are too many.
        """
        if name in self.all:
            raise FaultError(f"There is a model {name} already.")
        if len(self.all) >= MOST_MODELS:
            raise FaultError(f"The server trains {MOST_MODELS} models already; close a session with models of its own.")

        def add_adapter() -> tuple[str, Any]:
            adapter = self._adapters.create(lora)
            return adapter, new_trainer(self._adapters, adapter)

        adapter, trainer = await self._rollouts.call(add_adapter)
        facts = {
            "owner": session.owner,
            "base_model": self.name,
            "lora": vars(lora),
            "user_metadata": dict(user_metadata or {}),
            "created": self._store.clock(),
        }
        self._store.write_run(name, facts)
        model = Model(name, session.owner, lora, adapter, trainer, self._adapters, self._rollouts, self._futures, facts)
        self.all[name] = model
        return model

    def check_base(self, name: str) -> None:
        """Raise FaultError unless ``name`` is the model that is served."""
        if name not in (self.name, self.source):
            raise FaultError(f"There is no model '{name[:200]}' here; this server has '{self.name}'.", 404)

    def check_rank(self, rank: int) -> None:
        """Raise FaultError unless the server has models of that rank; 0 stands for all weights."""
        full = isinstance(self._adapters, Whole)
        if full and rank != 0:
            raise FaultError(
                f"rank is {rank}, and this server trains all weights of one model (--tinker_full) and no adapters; "
                "give rank 0, or start one without the option."
            )
        if not full and rank == 0:
            raise FaultError(
                f"rank is 0, which stands for all weights; give 1 to {MOST_RANK} for an adapter, or start a server "
                "with --tinker_full."
            )
        if not 0 <= rank <= MOST_RANK:
            raise FaultError(f"rank is {rank}; give 1 to {MOST_RANK}.")

    def check_optimizer(self, config: Any) -> None:
        """Raise FaultError if an optimiser is not served."""
        if config is not None and config.type != "adamw":
            raise FaultError(f"The optimiser '{config.type}' is not served; leave it out for AdamW.")

    def find(self, name: str | None, owner: str) -> Model:
        """Return a model in training.

        Raises:
            FaultError: there is none of that name and owner.
        """
        model = None if name is None else self.all.get(name)
        if model is None or model.owner != owner:
            raise FaultError(
                f"There is no model '{str(name)[:80]}' in training; one whose server has ended goes on from a saved "
                "state.",
                404,
            )
        self._sessions.find(model.name.partition(":")[0], owner).beat = time.monotonic()
        return model

    def info(self, owner: str, name: str) -> dict[str, Any]:
        model = self.find(name, owner)
        return {
            "type": "get_info",
            "model_data": {
                "arch": type(self._adapters.model).__name__,
                "model_name": self.name,
                "tokenizer_id": self.source,
            },
            "model_id": name,
            "is_lora": model.lora.rank > 0,
            "lora_rank": model.lora.rank or None,
            "model_name": self.name,
        }

    def unload_model(self, owner: str, name: str, size: int) -> Future:
        model = self.find(name, owner)
        future = self._futures.open(f"{name}:unload", owner, size, model_id=name)

        async def work() -> Reply:
            await self.unload(model)
            return {"type": "unload_model", "model_id": name}

        self._futures.start(future, work())
        return future

    async def unload(self, model: Model) -> None:
        """Remove a model with all that it has learned."""
        if self.all.pop(model.name, None) is not None:
            self.published.pop(model.name, None)
            await model.close()

    async def unload_of(self, session: Session) -> None:
        """Remove the models of a session."""
        for model in [model for model in self.all.values() if model.name.startswith(f"{session.id}:")]:
            await self.unload(model)
