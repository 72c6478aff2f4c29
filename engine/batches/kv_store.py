"""The interface through which a model's attention stores keys and attends: pages of a sampler, pieces of a tree."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionRule(NamedTuple):
    """The options of one layer's attention, as `tree_attention` takes them."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None  # [Hq]
    chunk: int | None = None


class KVStore(Protocol):
    """The ``kv_store`` that the rollout engine and `PieceStore` pass to the model."""

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [N, Hq, D]
        key: Tensor,  # [N, Hkv, D]
        value: Tensor,  # [N, Hkv, D]
        rule: AttentionRule,
    ) -> Tensor:  # [N, Hq, D]
        """Store the new keys and values of layer ``layer_idx``, then attend over every row's path."""
        ...
