"""Models in training: each is an adapter with an optimiser of its own, whose requests run in the client's order.

A request's micro-batches run one by one in the engine's thread, between steps of sampling and micro-batches of other
models. Its gradients are added to the model's when all of them are there, so a request that fails leaves no part of
itself behind.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tinker.types import AdamParams
from torch import Tensor

from rolltree.kernels import TermsLossOutput

from ..fleet.rollouts import Rollouts
from ..train.config import TrainerConfig
from ..train.trainer import Trainer
from .adapters import Lora
from .compute import Scored, Share, differentiate, score, shares
from .faults import FaultError
from .futures import Future, Futures, Reply
from .losses import Loss
from .whole import Weights
from .wire import Array, Batch, write_outputs

OPTIMIZER = "optimizer.safetensors"
WEIGHT = "weight."
"""Beginning of the names of weights in the trainer's state."""
MOST_AHEAD = 4096
"""Most requests of a model that wait for an earlier one."""
GAP_S = 600.0
"""Seconds after which requests fail whose predecessor has not come."""
CONFIG = TrainerConfig(max_grad_norm=math.inf, max_bad_steps=2**31)
"""The configuration of a new optimiser; each step brings numbers of its own."""

log = logging.getLogger("rolltree.tinker")

Work = Callable[[], Awaitable[Reply]]


def new_trainer(adapters: Weights, name: str) -> Trainer:
    """Return the trainer of an adapter; called in the engine's thread."""
    with adapters.training(name):
        return Trainer(adapters.model, CONFIG)


class Model:
    """A model in training.

    Args:
        adapter: its adapter's name in the module.
        trainer: made by `new_trainer`.
        facts: what is recorded of its run.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        lora: Lora,
        adapter: str,
        trainer: Trainer,
        adapters: Weights,
        rollouts: Rollouts,
        futures: Futures,
        facts: Mapping[str, Any],
    ) -> None:
        self.name, self.owner, self.lora, self.adapter, self.facts = name, owner, lora, adapter, dict(facts)
        self.trainer = trainer
        self._adapters, self._rollouts, self._futures = adapters, rollouts, futures
        self._next = 1
        self._waiting: dict[int, tuple[Future, Work]] = {}
        self._came = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    # -- order --------------------------------------------------------------------------------------------------------

    def submit(self, seq_id: int | None, size: int, work: Work) -> Future:
        """Queue a request; one that was sent before gets its future.

        Args:
            seq_id: the client's number of it, from 1 on.
            size: bytes of its body.

        Raises:
            FaultError: the number is wrong, or too many requests wait.
        """
        if seq_id is None or seq_id < 1:
            raise FaultError(f"seq_id is {seq_id}; number the requests of a model from 1 on.")
        request_id = f"{self.name}:{seq_id}"
        if (earlier := self._futures.find(request_id, self.owner)) is not None:
            return earlier
        if seq_id < self._next:
            raise FaultError(f"Request {seq_id} of model {self.name} was answered already.")
        if seq_id >= self._next + MOST_AHEAD:
            raise FaultError(f"Request {seq_id} of model {self.name} is far ahead of {self._next}; send it later.", 429)
        future = self._futures.open(request_id, self.owner, size, model_id=self.name)
        self._waiting[seq_id] = future, work
        self._came.set()
        return future

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._came.wait(), GAP_S if self._waiting else None)
            except TimeoutError:
                for seq_id, (future, _) in self._waiting.items():
                    message = (
                        f"Request {seq_id} of model {self.name} waited for request {self._next}, which never came."
                    )
                    await self._futures.run(future, _refuse(message))
                self._next = max(self._waiting) + 1
                self._waiting.clear()
            self._came.clear()
            while self._next in self._waiting:
                future, work = self._waiting[self._next]
                await self._futures.run(future, _awaited(work))
                del self._waiting[self._next]
                self._next += 1

    async def close(self) -> None:
        """Fail what waits and remove the adapter."""
        self._task.cancel()
        for future, _ in self._waiting.values():
            await self._futures.run(future, _refuse(f"Model {self.name} was unloaded."))
        await self._rollouts.call(partial(self._adapters.delete, self.adapter))

    # -- what a request does ------------------------------------------------------------------------------------------

    async def compute(self, batch: Batch, loss: Loss) -> Reply:
        """Compute loss and log-probs of a request, and add its gradients to the model's unless it asks for none."""
        parts = await asyncio.to_thread(shares, batch.data)
        logprobs: list[Array] = [datum.target for datum in batch.data]
        total, sums = 0.0, None
        for part in parts:
            if batch.forward_only:
                scored = await self._rollouts.call(partial(self._score, part, loss, batch))
            else:
                scored, gradients = await self._rollouts.call(partial(self._differentiate, part, loss, batch))
                sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
            total += scored.loss
            for i, values in zip(part.data, scored.logprobs, strict=True):
                logprobs[i] = values
        if sums is not None:
            await self._rollouts.call(partial(self._add, total, sums))
        return write_outputs(logprobs, {"loss:sum": total, **loss.metrics()})

    def _score(self, part: Share, loss: Loss, batch: Batch) -> Scored:
        with self._adapters.training(self.adapter):
            return score(self._adapters.model, part, loss, batch.data)

    def _differentiate(self, part: Share, loss: Loss, batch: Batch) -> tuple[Scored, list[Tensor]]:
        with self._adapters.training(self.adapter) as parameters:
            return differentiate(self._adapters.model, part, loss, batch.data, parameters)

    def _add(self, total: float, gradients: list[Tensor]) -> None:
        def compute() -> TermsLossOutput:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return TermsLossOutput(torch.tensor(total, dtype=torch.float64), {}, {})

        with self._adapters.training(self.adapter) as parameters:
            self.trainer.accumulate(compute)

    async def step(self, params: AdamParams) -> Reply:
        """Apply the gradients since the last step by AdamW."""
        config = _checked(params)
        metrics = await self._rollouts.call(partial(self._step, config))
        return {"type": "optim_step", "metrics": metrics}

    def _step(self, config: TrainerConfig) -> dict[str, float]:
        self.trainer.config = config
        with self._adapters.training(self.adapter):
            try:
                metrics = self.trainer.optim_step()
            except ValueError:
                raise FaultError("There are no gradients to apply; send forward_backward before optim_step.") from None
        if metrics["actor/skipped_updates"][0]:
            raise FaultError("A gradient is not finite, so the step was not applied and the gradients were dropped.")
        return {"grad_norm:mean": metrics["actor/grad_norm"][0], "learning_rate:mean": config.lr}

    # -- states -------------------------------------------------------------------------------------------------------

    def writer(self, base: str, optimizer: bool) -> Callable[[Path], dict[str, Any]]:
        """Return a function that writes the adapter, and the optimiser's state if asked for, and returns what else
        belongs to it. With the optimiser are the fp32 weights of which an adapter of another type is a rounded copy.
        It is called before the model's next request, in any thread; this in the engine's.
        """
        adapter = self._adapters.writer(self.adapter, self.lora, base)
        tensors, counters = self.trainer.state_dict()
        copied = {f"{WEIGHT}{name}" for name in self.trainer.copied}
        held = {name: tensor for name, tensor in tensors.items() if name in copied or not name.startswith(WEIGHT)}
        plain = {name.replace(f".{self.adapter}.", "."): t.detach().cpu().contiguous() for name, t in held.items()}

        def write(directory: Path) -> dict[str, Any]:
            adapter(directory)
            if optimizer:
                save_file(plain, directory / OPTIMIZER)
            return {"lora": vars(self.lora), "base_model": base, "counters": counters}

        return write

    def read(self, directory: Path, meta: Mapping[str, Any], optimizer: bool) -> None:
        """Take the weights of a saved state, with its optimiser or with a new one; pending gradients are dropped.

        Called in the engine's thread.

        Raises:
            FaultError: the state has other shapes, or no optimiser.
        """
        if optimizer and not (directory / OPTIMIZER).exists():
            raise FaultError("The checkpoint has no optimiser; load the weights alone, or what save_state has saved.")
        self._adapters.read(self.adapter, directory)
        self.trainer.drop_gradients()
        self.trainer = new_trainer(self._adapters, self.adapter)
        if optimizer:
            tensors = {name: t for name, t in self.trainer.state_dict()[0].items() if name.startswith(WEIGHT)}
            marked = f".{self.adapter}."
            names = {name.removeprefix(WEIGHT).replace(marked, "."): name.removeprefix(WEIGHT) for name in tensors}
            saved = load_file(directory / OPTIMIZER)
            if self.trainer.copied and not any(name.startswith(WEIGHT) for name in saved):
                log.warning("%s has no fp32 weights; training goes on from its adapter, rounded.", directory)
            for name, tensor in saved.items():
                kind, _, parameter = name.partition(".")
                tensors[f"{kind}.{names[parameter]}"] = tensor
            self.trainer.load_state_dict(tensors, dict(meta["counters"]))


def _checked(params: AdamParams) -> TrainerConfig:
    numbers = params.model_dump()
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise FaultError(f"{name} is {value}; give a finite number of at least 0.")
    for name in ("beta1", "beta2"):
        if numbers[name] >= 1:
            raise FaultError(f"{name} is {numbers[name]}; give a number below 1.")
    if params.eps == 0:
        raise FaultError("eps is 0, which divides by zero where a weight has no gradient; give a small number.")
    return replace(
        CONFIG,
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=params.grad_clip_norm or math.inf,
    )


async def _refuse(message: str) -> Reply:
    raise FaultError(message)


async def _awaited(work: Work) -> Reply:
    return await work()
