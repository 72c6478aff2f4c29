"""LoRA adapters of clients in the one frozen module: those in training, and saved ones to sample with.

An adapter has the client's rank and seed, and exactly the parts that it asks for: the linear layers of attention, those
of the MLPs, and the head. The scale is 32 / rank, as in "LoRA Without Regret", whose authors run the service.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fleet.rollouts import Rollouts
from ..model.lora import FILE, PREFIX, adapted_layers, check_installed, delete_adapter, use_adapter
from ..model.pictures import tower_parameters
from ..rollout import NativeEngine
from .faults import FaultError

ALPHA = 32
MOST_RANK = 1024
MOST_RESIDENT = 8
"""Saved adapters that stay in the module although no request samples with them."""


@dataclass(frozen=True)
class Lora:
    """An adapter as a client asks for it."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names of the linear layers by the part that they belong to: ``attn``, ``mlp`` and ``unembed``.

    Raises:
        FaultError: a layer belongs to no part that is known.
    """
    tower = {id(parameter) for _, parameter in tower_parameters(model)}
    head = model.get_output_embeddings()
    names: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    layers = {name for name, _ in adapted_layers(model)}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if inside or not (isinstance(module, nn.Linear) or name in layers) or id(module.weight) in tower:
            continue
        if module is head:
            names["unembed"].append(name)
        elif any(word in name for word in ("attn", "attention")):
            names["attn"].append(name)
        elif any(word in name for word in ("mlp", "feed_forward", "ffn", "expert")):
            names["mlp"].append(name)
        else:
            raise FaultError(f"The layer '{name}' is part of neither attention nor MLP, so no adapter can be made.")
    return names


def targets(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Return the names of the layers of an adapter.

    Raises:
        FaultError: a part cannot be trained, or none is asked for.
    """
    names = parts(model)
    tensors = any(p.dim() > 2 and "expert" in name for name, p in model.named_parameters())
    if lora.train_mlp and (tensors or any(".experts." in name for name in names["mlp"])):
        raise FaultError("The experts of this model get no adapter here; set train_mlp=False.")
    chosen: list[str] = []
    for part, trained in (("attn", lora.train_attn), ("mlp", lora.train_mlp), ("unembed", lora.train_unembed)):
        if trained and not names[part]:
            raise FaultError(f"The model has no linear layer for train_{part}; set train_{part}=False.")
        chosen += names[part] if trained else []
    if not chosen:
        raise FaultError("The adapter would train nothing; set train_attn, train_mlp or train_unembed.")
    return chosen


def _config(model: PreTrainedModel, lora: Lora) -> Any:
    import peft

    return peft.LoraConfig(
        r=lora.rank, lora_alpha=ALPHA, target_modules=_short(model, targets(model, lora)), task_type="CAUSAL_LM"
    )


def _short(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the last parts of the names, if they name no other layer, also none of a vision tower, else the names."""
    last = {name.rpartition(".")[2] for name in names}
    same = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last) if same == set(names) else list(names)


class Adapters:
    """The adapters of a server.

    Args:
        engine: samples with the module; its thread alone may change it.
        rollouts: calls functions in that thread.
    """

    def __init__(self, engine: NativeEngine, rollouts: Rollouts) -> None:
        check_installed()
        self._engine, self._rollouts = engine, rollouts
        self.model = engine.model
        self._numbers = itertools.count(1)
        self._saved: dict[str, _Resident] = {}  # by place, the least recently used first
        self._lock = asyncio.Lock()

    @property
    def resident(self) -> int:
        """The number of saved adapters in the module."""
        return len(self._saved)

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def create(self, lora: Lora) -> str:
        """Add an adapter whose A is drawn by the seed and whose B is zero, and return its name.

        Raises:
            FaultError: the model cannot have it.
        """
        config = _config(self.model, lora)
        name = f"a{next(self._numbers)}"
        import peft

        with self._engine.changing_adapters(), torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a head that shares the embedding's weight has an adapter of its own
            torch.manual_seed(lora.seed)
            peft.inject_adapter_in_model(config, self.model, name)
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
        return name

    def delete(self, name: str) -> None:
        """Remove an adapter that is not in use."""
        with self._engine.changing_adapters():
            delete_adapter(self.model, name)

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Return the parameters of an adapter by their names in a file of peft, without its prefix."""
        marked = f".{name}."
        return {n.replace(marked, "."): p for n, p in self.model.named_parameters() if marked in n}

    @contextmanager
    def training(self, name: str) -> Iterator[list[Tensor]]:
        """Compute with an adapter, whose parameters take gradients, in a with-block."""
        with self._engine.changing_adapters():
            use_adapter(self.model, name)
            self.model.eval()
            yield list(self.parameters(name).values())

    def writer(self, name: str, lora: Lora, base: str) -> Callable[[Path], None]:
        """Return a function that writes an adapter, in any thread and before its weights change again, as a directory
        that ``peft.PeftModel.from_pretrained`` loads onto the base model."""
        tensors = {f"{PREFIX}{n}": p.detach().cpu().contiguous() for n, p in self.parameters(name).items()}
        config = _config(self.model, lora)
        config.base_model_name_or_path, config.inference_mode = base, True

        def write(directory: Path) -> None:
            save_file(tensors, directory / FILE, metadata={"format": "pt"})
            config.save_pretrained(str(directory))

        return write

    def read(self, name: str, directory: Path) -> None:
        """Copy the weights of a directory into an adapter of the same shapes.

        Raises:
            FaultError: the shapes differ.
        """
        parameters = self.parameters(name)
        stored = {n.removeprefix(PREFIX): t for n, t in load_file(directory / FILE).items()}
        if {n: t.shape for n, t in stored.items()} != {n: p.shape for n, p in parameters.items()}:
            raise FaultError("The saved adapter has other layers or another rank than the model.")
        with torch.no_grad():
            for n, parameter in parameters.items():
                parameter.copy_(stored[n])

    # -- in the event loop --------------------------------------------------------------------------------------------

    async def lend(self, place: Path | None, lora: Lora | None) -> tuple[str | None, Callable[[], None]]:
        """Return the name of a saved adapter, and a function: the adapter stays in the module until it is called.

        Args:
            place: directory of the adapter; None for the base model, whose name is None.
            lora: what the adapter is.
        """
        if place is None or lora is None:
            return None, _nothing
        async with self._lock:
            key = str(place)
            resident = self._saved.pop(key, None)
            if resident is None:
                resident = _Resident(await self._rollouts.call(partial(self._load, place, lora)))
            self._saved[key] = resident
            resident.users += 1
            await self._evict()
        return resident.name, partial(self._give_back, key, resident)

    def _give_back(self, key: str, resident: _Resident) -> None:
        resident.users -= 1
        if resident.users == 0 and self._saved.get(key) is not resident:  # forgotten meanwhile
            self._rollouts.later(partial(self._unload, resident.name))

    def _load(self, place: Path, lora: Lora) -> str:
        name = self.create(lora)
        try:
            self.read(name, place)
            self._engine.add_adapter(name)
        except BaseException:
            self.delete(name)
            raise
        return name

    async def _evict(self) -> None:
        idle = [key for key, resident in self._saved.items() if resident.users == 0]
        for key in idle[: max(len(self._saved) - MOST_RESIDENT, 0)]:
            await self._rollouts.call(partial(self._unload, self._saved.pop(key).name))

    def _unload(self, name: str) -> None:
        self._engine.drop_adapter(name)
        self.delete(name)

    async def forget(self, place: Path) -> None:
        """Let go of a saved adapter whose directory was deleted or replaced."""
        async with self._lock:
            resident = self._saved.pop(str(place), None)
            if resident is not None and resident.users == 0:
                await self._rollouts.call(partial(self._unload, resident.name))


def _nothing() -> None:
    pass


@dataclass
class _Resident:
    name: str
    users: int = field(default=0)
