"""LoRA adapters of a policy (Hu et al. 2021), injected by peft into the loaded model, which keeps its class.

The base weights are frozen and serve all uses: the policy is the model with its adapter, a reference the same model
without it (`without_adapter`). A sampler with weights of its own has the adapter too and gets A and B alone (`Alone`):
in bf16 an update that is small against a weight would be lost in their sum. Where vLLM cannot compute with an adapter
it gets that sum, under the names of a model without adapters (`Merged`).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from .pictures import tower_parameters
from .sharding import named_shards, whole

NAME = "default"
"""Name of the adapter in peft."""
PREFIX = "base_model.model."
"""Beginning of the names in peft's files, from its wrapper around a model."""
ALL = "all-linear"
"""The targets that are all linear layers except the head."""
FILE = "adapter_model.safetensors"


def find_targets(model: Any, targets: str | Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers of ``model``, by their full names, that get an adapter; a vision tower's get none.

    Args:
        model: may be on the meta device.
        targets: last parts of names, or `ALL`.

    Raises:
        UserError: a target is no linear layer's name, or it is the head's, which shares its weight with the embedding.
    """
    tower = {id(parameter) for _, parameter in tower_parameters(model)}
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in tower
    }
    head = model.get_output_embeddings()
    if targets == ALL:
        return {name: module for name, module in linear.items() if module is not head}
    chosen = [targets] if isinstance(targets, str) else list(targets)
    names = sorted({name.rpartition(".")[2] for name in linear})
    if unknown := [name for name in chosen if name not in names]:
        raise UserError(
            f"model.lora.targets names '{unknown[0]}', and no linear layer of the model is called so; they are "
            f"{', '.join(names)}, and '{ALL}' stands for all except the head."
        )
    layers = {name: module for name, module in linear.items() if name.rpartition(".")[2] in chosen}
    if any(module is head for module in layers.values()) and head.weight is model.get_input_embeddings().weight:
        raise UserError(
            "model.lora.targets names the head, whose weight is the embedding's too in this model, so that no model "
            "without adapters holds both; leave it out."
        )
    return layers


def check_installed() -> None:
    """Check that peft can be imported.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("[model.lora] needs peft, which is not installed; install rolltree[lora], or leave it out.")


def add_lora(model: PreTrainedModel, *, rank: int, alpha: float, rslora: bool, targets: str | Sequence[str]) -> None:
    """Add an adapter to ``model`` and freeze all its other weights.

    A target then computes ``x W' + s (x A') B'``, with A ``[rank, in]`` drawn from torch's generator and B
    ``[out, rank]`` zero, so that the policy is the model's at first. There is no dropout, since the log-probs of
    sampler and trainer must agree.

    Args:
        rank: of the product B A.
        alpha: numerator of the scale s.
        rslora: s is ``alpha / sqrt(rank)`` (rsLoRA, Kalajdzievski 2023), otherwise ``alpha / rank``.
        targets: see `find_targets`.

    Raises:
        UserError: as `check_installed` and `find_targets`.
    """
    check_installed()
    import peft

    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # it only divides this
        use_rslora=rslora,
        target_modules=list(find_targets(model, targets)),
        task_type="CAUSAL_LM",
    )
    peft.inject_adapter_in_model(config, model, NAME)
    model.rolltree_lora = config


def has_lora(model: Any) -> bool:
    """Return whether `add_lora` has added an adapter to ``model``."""
    return hasattr(model, "rolltree_lora")


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the base weights alone in a with-block."""
    layers = [layer for _, layer in adapted_layers(model)]
    named_shards(model)  # peft marks parameters, which must be the shards
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        named_shards(model)
        for layer in layers:
            layer.enable_adapters(True)


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Compute with the loaded adapter ``name`` from now on; None for the base weights alone.

    It calls peft's layers. Transformers' own calls ask for a release of peft that may not be out yet (0.22 in 5.24).
    """
    for _, layer in adapted_layers(model):
        if name is not None:
            layer.set_adapter(name)
        layer.enable_adapters(name is not None)


def delete_adapter(model: PreTrainedModel, name: str) -> None:
    """Remove the loaded adapter ``name``; the base weights alone compute from now on."""
    use_adapter(model, None)
    for _, layer in adapted_layers(model):
        if name in {*layer.lora_A, *layer.lora_embedding_A}:
            layer.set_adapter([])  # else peft would choose another one, and warn
            layer.delete_adapter(name)
    getattr(model, "peft_config", {}).pop(name, None)


class _Sums(Mapping[str, Tensor]):
    """The result of `merged`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = dict(adapted_layers(model))
        self._base = {name.replace(".base_layer.", "."): p for name, p in _base(model).items()}

    def __getitem__(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        if last == "weight" and owner in self._layers:
            return _sum(self._base[name].detach(), self._layers[owner])
        return self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def merged(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the policy's parameters by their names in a model without adapters, with ``W + s B A`` for W.

    Each sum is computed when it is read, in fp32, and rounded once; of a sharded model all ranks must read it, which
    gathers it. Parameters without adapter are the model's own tensors, or shards.
    """
    return _Sums(model)


@dataclass(frozen=True)
class Merged:
    """The source of `merged` weights for a sampler that has a model without adapters."""

    model: PreTrainedModel

    def tensors(self) -> Mapping[str, Tensor]:
        return merged(self.model)


@dataclass(frozen=True)
class Alone:
    """The source of the adapter's weights for a sampler whose model has the same adapter."""

    model: PreTrainedModel

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: p for name, p in named_shards(self.model).items() if ".lora_" in name}


def gathered_sum(model: PreTrainedModel, kept: bool) -> dict[str, Tensor]:
    """Return the state of a model without adapters whose weights are the policy's, as `sharding.gathered` does."""
    state = {}
    for name, tensor in merged(model).items():
        full = whole(tensor.detach())
        if kept:
            state[name] = full.cpu()
    buffers = dict(model.named_buffers())
    return state | {name: tensor for name, tensor in model.state_dict().items() if kept and name in buffers}


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``model`` without adapters, whose weights are those of the policy."""
    weights, copied = merged(model), copy.deepcopy(model)
    for name, layer in list(adapted_layers(copied)):
        parent, _, last = name.rpartition(".")
        setattr(copied.get_submodule(parent), last, layer.get_base_layer())
    for attribute in ("rolltree_lora", "peft_config"):
        vars(copied).pop(attribute, None)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(weights[name])
    return copied


def save_adapter(model: PreTrainedModel, directory: Path, writes: bool = True) -> None:
    """Write the adapter as files that ``peft.PeftModel.from_pretrained`` loads onto the model it was added to.

    Args:
        writes: False on all ranks of a sharded model but one; all must call it.
    """
    tensors = {
        f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": whole(p.detach()).cpu().contiguous()
        for name, p in named_shards(model).items()
        if ".lora_" in name
    }
    if not writes:
        return
    directory.mkdir(parents=True)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    config: Any = copy.copy(model.rolltree_lora)
    config.base_model_name_or_path, config.inference_mode = model.name_or_path, True
    config.save_pretrained(str(directory))


def base_digest(model: PreTrainedModel) -> str:
    """Return a digest of the frozen weights, which no checkpoint of an adapter holds."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in _base(model).items():
        values = whole(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _base(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p for name, p in named_shards(model).items() if ".lora_" not in name}


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with an adapter, each with its name."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _sum(weight: Tensor, layer: Any) -> Tensor:
    a, b = (whole(side[NAME].weight.detach()).float() for side in (layer.lora_A, layer.lora_B))
    total: Tensor = (whole(weight).float() + layer.scaling[NAME] * (b @ a)).to(weight.dtype)
    return total
