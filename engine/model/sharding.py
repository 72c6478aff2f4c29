"""Shards a decoder over ranks by FSDP2, to match the modules that this package calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, **options: Any) -> None:
    """Shard every layer, then the decoder and the head, which stays tied to the embedding if it is.

    The causal model itself stays unsharded: its own forward, which would compute logits, is never called.

    Args:
        options: passed to ``fully_shard``: ``mesh``, ``mp_policy``, ``reshard_after_forward``, ...

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    decoder = model.get_decoder()
    embedding, layer = model.get_input_embeddings(), model.get_output_embeddings()
    tied = layer.weight is embedding.weight
    for block in decoder.layers:
        fully_shard(block, **options)
    fully_shard(decoder, **options)
    if tied:
        layer.weight = embedding.weight  # the sharded parameter
    else:
        fully_shard(layer, **options)


def whole(weight: Tensor) -> Tensor:
    """Return ``weight``, gathered if it is sharded; its gradient is then averaged over the ranks, as FSDP does."""
    if not isinstance(weight, DTensor):
        return weight
    full: Tensor = weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)
    return full
