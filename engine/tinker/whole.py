"""All weights of one model, trained in place of adapters: ``rolltree serve MODEL --tinker --tinker_full``.

A second module is trained, which is there while a client has it. The engine's module samples with one set of weights
at a time, those of the base model or saved ones: requests for other weights wait until the running ones have ended,
in the order of their arrival. Saved states are directories that plain transformers loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..fleet.rollouts import Rollouts
from ..model.loading import load_model
from ..model.processor import copy_processor
from ..rollout import NativeEngine
from .adapters import Adapters, Lora
from .faults import FaultError

NAME = "whole"
"""The name of the only model in training, which no parameter's name contains."""
CHANGED = ""
"""The directory of the engine's module while its weights may be of none."""


class Whole:
    """The weights of a server that trains all of them; the methods are those of `Adapters`.

    Args:
        engine: samples, in fp32; its thread alone may change its module.
        rollouts: calls functions in that thread.
        source: directory of the base model.
    """

    resident = 0
    """The number of saved adapters in the module."""

    def __init__(self, engine: NativeEngine, rollouts: Rollouts, source: str) -> None:
        self._engine, self._rollouts, self._source = engine, rollouts, source
        self.model = engine.model
        """The module that is trained; the engine's while there is none."""
        self._held = source  # directory of the weights in the engine's module
        self._users = 0  # requests that sample with them
        self._turn, self._free = asyncio.Lock(), asyncio.Event()

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def create(self, lora: Lora) -> str:
        """Load the base model to be trained, and return its name.

        Raises:
            FaultError: another model is in training.
        """
        if self.model is not self._engine.model:
            raise FaultError(
                "This server trains all weights of one model, and one is in training already; finish its session, or "
                "start a server without --tinker_full, which trains adapters of many clients."
            )
        self.model = self._read(self._source).to(self._engine.model.device)
        return NAME

    def delete(self, name: str) -> None:
        """Let go of the model in training."""
        self.model = self._engine.model

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Return the parameters that are trained, by their names; the vision tower's are none of them."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    @contextmanager
    def training(self, name: str) -> Iterator[list[Tensor]]:
        """Compute with the model in training in a with-block."""
        self.model.eval()
        yield list(self.parameters(name).values())

    def writer(self, name: str, lora: Lora, base: str) -> Callable[[Path], None]:
        """Return a function that writes the model, in any thread and before its weights change again, as a directory
        that plain transformers loads, with its tokenizer."""
        model, tokenizer = self.model, self._engine.tokenizer
        assert tokenizer is not None

        def write(directory: Path) -> None:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            copy_processor(self._source, directory)

        return write

    def read(self, name: str, directory: Path) -> None:
        """Copy the weights of a directory into the model in training."""
        stored = dict(self._read(directory).named_parameters())
        with torch.no_grad():
            for n, parameter in self.model.named_parameters():
                parameter.copy_(stored[n])

    def _read(self, directory: str | Path) -> PreTrainedModel:
        model: PreTrainedModel = load_model(directory)
        return model

    # -- in the event loop --------------------------------------------------------------------------------------------

    async def lend(self, place: Path | None, lora: Lora | None) -> tuple[None, Callable[[], None]]:
        """Return None, the adapter to sample with, and a function: the engine's module has the weights until it is
        called.

        Args:
            place: directory of the weights; None for the base model.
            lora: what they are.
        """
        source = self._source if place is None else str(place)
        async with self._turn:  # which later requests for the weights of now wait for, too
            if source != self._held:
                while self._users:
                    self._free.clear()
                    await self._free.wait()
                self._held = CHANGED  # and stays so if the request is cancelled meanwhile
                await self._rollouts.call(partial(self._hold, source))
                self._held = source
            self._users += 1
        return None, self._give_back

    def _give_back(self) -> None:
        self._users -= 1
        self._free.set()

    def _hold(self, directory: str) -> None:
        self._engine.update_weights(dict(self._read(directory).named_parameters()))

    async def forget(self, place: Path) -> None:
        """Let go of saved weights whose directory was deleted or replaced."""
        if self._held == str(place):
            self._held = CHANGED


Weights = Adapters | Whole
"""Adapters of a frozen base, or all weights of one model."""
