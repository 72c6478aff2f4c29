"""The FLOP of computing a tree, and of its flat batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.tree import TokenTree
from .rows import distinct_rows

EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names in configurations of the number of experts, and of those that compute a token."""


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

    def shared(self, tree: TokenTree) -> float:
        """FLOP of the tree: every distinct prefix once."""
        rows = distinct_rows(tree)
        scored = np.unique(rows.of_token[tree.loss_mask & (tree.response_leaves > 0)]).size
        return self.token * rows.num_rows + self.attention * rows.visible + self.scored * scored

    def flat(self, tree: TokenTree) -> float:
        """FLOP of the flat batch: every leaf's path on its own."""
        length = tree.path_length.astype(np.float64)
        visible = float((length * (length + 1) / 2).sum())
        return self.token * tree.logical_tokens + self.attention * visible + self.scored * tree.loss_tokens


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
