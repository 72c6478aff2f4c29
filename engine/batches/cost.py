"""The FLOP of computing a tree, and of its flat batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.tree import TokenTree
from .batch import TreeBatch
from .rows import distinct_rows

EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names in configurations of the number of experts, and of those that compute a token."""


@dataclass(frozen=True)
class Work:
    """The rows and pairs that a decoder computes in one forward pass, and the rows that its head reads."""

    rows: float = 0.0
    pairs: float = 0.0  # of a row and a row that it sees, itself included
    heads: float = 0.0  # rows whose logits are computed

    def __add__(self, other: Work) -> Work:
        return Work(self.rows + other.rows, self.pairs + other.pairs, self.heads + other.heads)

    @staticmethod
    def of(batches: Iterable[TreeBatch]) -> Work:
        """The forward pass of ``batches``, with the rows that only fill padded ones."""
        return sum((_work(batch) for batch in batches), Work())

    @staticmethod
    def again(batches: Iterable[TreeBatch]) -> Work:
        """The pieces of ``batches`` that are computed a second time, for the rows that see them (`pieces.py`)."""
        return sum((_piece_work(batch) for batch in batches), Work())


def _work(batch: TreeBatch) -> Work:
    rows = batch.num_tokens if batch.padded is None else batch.padded[0] * batch.padded[1]
    return Work(rows, float(batch.position_ids.sum()) + batch.num_tokens, len(batch.head_row))


def _piece_work(batch: TreeBatch) -> Work:
    total = Work()
    for piece in batch.pieces:
        if piece.last > piece.end:
            depth = batch.position_ids[piece.begin : piece.end]
            total += Work(len(depth), float(depth.sum()) + len(depth))
    return total


@dataclass(frozen=True)
class CostModel:
    """FLOP of one forward; a backward is twice that, so ratios hold for a whole step.

    Layers with a sliding window are counted as full attention. Trees share less of attention than of tokens, so this
    understates the savings. Of recurrent layers the recurrence is counted, the products of each head's state with a
    token's key, value and query; kernels that compute in chunks do more.
    """

    token: float  # projections, feed-forward and recurrences of one token, in all layers
    attention: float  # of one row to one key, in all layers
    scored: float  # the head, for one token

    @staticmethod
    def of(model: PreTrainedModel) -> CostModel:
        """The costs of a Transformers decoder, from its shapes; of experts the active ones count."""
        config = model.config.get_text_config()
        decoder = model.get_decoder()
        weights = float(sum(p.numel() for p in decoder.parameters() if p.dim() >= 2))
        weights -= sum(e.weight.numel() for e in decoder.modules() if isinstance(e, torch.nn.Embedding))
        experts = [p.numel() for name, p in decoder.named_parameters() if ".experts." in name]
        if experts:
            count = next(n for name in EXPERTS if (n := getattr(config, name, None)))
            active = next(n for name in ACTIVE if (n := getattr(config, name, None)))
            weights -= sum(experts) * (1 - active / count)
        return CostModel(
            token=2 * weights + sum(map(_recurrence, decoder.modules())),
            attention=sum(_attention(layer, config) for layer in decoder.modules() if _attends(layer)),
            scored=2 * config.hidden_size * config.vocab_size,
        )

    def forward(self, work: Work) -> float:
        """FLOP of one forward pass."""
        return self.token * work.rows + self.attention * work.pairs + self.scored * work.heads

    def shared(self, tree: TokenTree) -> float:
        """FLOP of the tree: every distinct prefix once."""
        rows = distinct_rows(tree)
        scored = np.unique(rows.of_token[tree.loss_mask & (tree.response_leaves > 0)]).size
        return self.forward(Work(rows.num_rows, rows.visible, scored))

    def flat(self, tree: TokenTree) -> float:
        """FLOP of the flat batch: every leaf's path on its own."""
        length = tree.path_length.astype(np.float64)
        visible = float((length * (length + 1) / 2).sum())
        return self.forward(Work(tree.logical_tokens, visible, tree.loss_tokens))


def _attends(layer: Any) -> bool:
    """Tell Transformers' attention modules from all others."""
    return getattr(layer, "is_causal", None) is not None and hasattr(layer, "layer_idx")


def _attention(layer: Any, config: Any) -> float:
    """Return the FLOP of one row to one key: products with the key and the value, whose widths may differ."""
    heads = getattr(layer, "num_heads", None) or config.num_attention_heads
    usual = getattr(layer, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    key, value = getattr(layer, "qk_head_dim", None) or usual, getattr(layer, "v_head_dim", None) or usual
    return 2.0 * heads * (key + value)


def _recurrence(layer: Any) -> float:
    """Return the FLOP of a recurrent layer's states for one token; 0 for another module or a convolution's inputs."""
    if hasattr(layer, "head_k_dim"):  # gated delta rule: what the key reads, what is written, what the query reads
        return 6.0 * layer.num_v_heads * layer.head_k_dim * layer.head_v_dim
    if type(layer).__name__.endswith("DeltaAttention"):  # Kimi's
        return 6.0 * layer.num_heads * layer.head_dim**2
    if hasattr(layer, "ssm_state_size") and hasattr(layer, "head_dim"):  # Mamba-2 reads nothing before it writes
        return 4.0 * layer.num_heads * layer.head_dim * layer.ssm_state_size
    return 0.0
