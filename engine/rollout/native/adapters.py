"""LoRA adapters of rows: a step computes the base's products once for all rows, and adds to each row its own adapter's.

peft has put the adapters into the model's linear layers. They are off; for a step with rows that have one, each such
layer multiplies with the base's weight and then calls `rolltree.kernels.low_rank` for the runs of rows of each adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels.low_rank import Adapters, LowRank, Runs, add_low_rank_

from ...model.lora import adapted_layers
from ...model.pictures import tower_parameters

Array = npt.NDArray[Any]
MOST_ADAPTERS = 1 << 16
"""Numbers of adapters, 0 being the model without one; cached keys are told apart by them (`NativeLoop`)."""


@dataclass(frozen=True)
class Tables:
    """The adapters by layer; each layer has the same ones in the same order."""

    numbers: Array  # [G] int64, ascending
    layers: dict[nn.Module, Adapters]  # the head aside
    head: Adapters | None  # fp32, as logits are

    def of(self, layer: nn.Module, weight: Tensor) -> Adapters:
        """Return the adapters of a layer with ``weight``, which may have none."""
        return self.layers.get(layer) or Adapters([None] * len(self.numbers), weight)


class RowAdapters:
    """The adapters that requests name, by number; 0 stands for none. Numbers are not given again before all have been,
    because cached keys have them.

    Attributes:
        numbers: by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.numbers: dict[str, int] = {}
        self._last = 0
        self._tables: Tables | None = None

    def add(self, name: str) -> bool:
        """Give an adapter of the module a number; return whether numbers of earlier ones are given again from now on,
        so that their keys must not be found.

        Raises:
            ValueError: it has a part that cannot be computed row by row.
        """
        _check(self._model, name)
        again = self._last == MOST_ADAPTERS - 1
        if again:
            self._last = 0
        free = set(range(self._last + 1, MOST_ADAPTERS)).difference(self.numbers.values())
        self._last = self.numbers[name] = min(free)
        self.forget_tables()
        return again

    def drop(self, name: str) -> None:
        """Forget an adapter."""
        del self.numbers[name]
        self.forget_tables()

    def forget_tables(self) -> None:
        """Read the adapters' tensors again before the next step, because they have moved."""
        self._tables = None

    @property
    def tables(self) -> Tables:
        """The adapters by layer."""
        if self._tables is None:
            self._tables = _tables(self._model, self.numbers)
        return self._tables

    def places(self, numbers: Array) -> Array | None:  # [N] int64 -> [N] int64
        """Return the place of each row's adapter in the tables, -1 for none; None if no row has one."""
        if not numbers.any():
            return None
        return np.where(numbers > 0, np.searchsorted(self.tables.numbers, numbers), -1)

    @contextmanager
    def computing(self, runs: Runs | None) -> Iterator[None]:
        """Let the layers of the decoder add the adapters of a step's rows in a with-block."""
        if runs is None:
            yield
            return
        layers = self.tables.layers
        for layer, adapters in layers.items():
            vars(layer)["forward"] = partial(_forward, layer, adapters, runs)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]


def _forward(layer: Any, adapters: Adapters, runs: Runs, x: Tensor) -> Tensor:
    out: Tensor = layer.base_layer(x)
    add_low_rank_(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]).contiguous(), adapters, runs)
    return out


def _tables(model: PreTrainedModel, numbers: dict[str, int]) -> Tables:
    names = sorted(numbers, key=numbers.__getitem__)
    head, of_head = model.get_output_embeddings(), None
    layers: dict[nn.Module, Adapters] = {}
    for _, layer in adapted_layers(model):
        of_products = [_low_rank(layer, name) for name in names]
        if any(of_products):
            weight = layer.weight.T if layer.fan_in_fan_out else layer.weight
            if layer is head:
                of_head = Adapters(of_products, weight, torch.float32)
            else:
                layers[layer] = Adapters(of_products, weight)
    return Tables(np.array([numbers[name] for name in names], np.int64), layers, of_head)


def _low_rank(layer: Any, name: str) -> LowRank | None:
    if name not in layer.lora_A:
        return None
    return LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))


def _check(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if an adapter has a part that is not a product of a step's rows with two plain matrices."""
    from peft.tuners.lora.layer import Linear

    tower = {id(parameter) for _, parameter in tower_parameters(model)}
    for where, layer in adapted_layers(model):
        if name not in {*layer.lora_A, *layer.lora_embedding_A}:
            continue
        unsupported = {
            f"an adapter of the kind {type(layer).__name__}": type(layer) is not Linear,
            "a LoRA variant (use_dora, ...)": name in getattr(layer, "lora_variant", {}),
            "lora_bias": layer.lora_bias.get(name, False),
            "a part in the vision tower": id(layer.weight) in tower,
            "a part in an expert, which computes some of the rows": ".experts." in where,
        }
        if what := next((kind for kind, there in unsupported.items() if there), None):
            raise ValueError(
                f"The adapter '{name}' has {what} at '{where}', which the native engine does not compute; leave it out "
                "of the adapter."
            )
