"""The sizes of a model, read from its directory without its weights, and the memory that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from ..errors import UserError
from ..model.loading import auto_class
from ..model.lora import check_installed, find_targets
from ..parts.calling import failure
from ..settings import LoraConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder.

    Attributes:
        kind: name of its class.
        parameters: number of parameters.
        positions: longest sequence in tokens; None without a limit.
        layers: number of layers.
        heads: heads of queries in a layer.
        key_heads: heads of keys and values in a layer.
        dim: width of a head.
        unlike: reason why it is not a plain dense decoder; empty if it is one.
        adapter: number of parameters of its LoRA adapter, which are then the only ones that are trained; None: it has
            none.
    """

    kind: str
    parameters: int
    positions: int | None
    layers: int
    heads: int
    key_heads: int
    dim: int
    unlike: str
    adapter: int | None = None

    def training_bytes(self, dtype: str) -> int:
        """Return the bytes of weights, gradients, moments and, in bfloat16, fp32 master weights and sums.

        Weights below an adapter have none of the others.
        """
        weight = BYTES[dtype]
        frozen, trained = (0, self.parameters) if self.adapter is None else (self.parameters, self.adapter)
        return frozen * weight + trained * (weight * 2 + 8 + (0 if weight == 4 else 8))

    def key_bytes(self, dtype: str) -> int:
        """Return the bytes of a token's keys and values."""
        return 2 * self.layers * self.key_heads * self.dim * BYTES[dtype]


def read_sizes(path: Path, lora: LoraConfig | None = None) -> ModelSizes:
    """Read the sizes of the model in a directory, and of the adapter ``lora`` on it.

    Raises:
        UserError: its config.json cannot be read, or the adapter does not fit.
    """
    try:
        hf = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = auto_class(hf).from_config(hf)
    except Exception as error:
        raise UserError(f"The model '{path}' cannot be loaded: {failure(error)}.") from error
    adapter = None
    if lora is not None:
        check_installed()
        targets = find_targets(model, lora.targets).values()
        adapter = lora.rank * sum(layer.in_features + layer.out_features for layer in targets)
    text = hf.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    unlike = f"layers of type {min(other)}" if other else ""
    if any(".experts." in name for name, _ in model.named_parameters()):
        unlike = "a mixture of experts"
    return ModelSizes(
        kind=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        positions=getattr(text, "max_position_embeddings", None),
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        key_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        unlike=unlike,
        adapter=adapter,
    )
