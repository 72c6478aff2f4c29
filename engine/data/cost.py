"""The FLOP of computing a tree, and of its flat batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from .rows import distinct_rows
from .tree import TokenTree


@dataclass(frozen=True)
class CostModel:
    """FLOP of one forward; a backward is twice that, so ratios hold for a whole step.

    Layers with a sliding window are counted as full attention. Trees share less of attention than of tokens, so this
    understates the savings.
    """

    token: float  # projections and feed-forward of one token, in all layers
    attention: float  # of one row to one key, in all layers
    scored: float  # the head, for one token

    @staticmethod
    def of(model: PreTrainedModel) -> CostModel:
        """The costs of a Transformers decoder, from its shapes; of experts the active ones count."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        decoder = model.get_decoder()
        weights = float(sum(p.numel() for p in decoder.parameters() if p.dim() >= 2))
        weights -= sum(e.weight.numel() for e in decoder.modules() if isinstance(e, torch.nn.Embedding))
        experts = [p.numel() for name, p in decoder.named_parameters() if ".experts." in name]
        if experts:
            count = getattr(config, "num_experts", None) or config.num_local_experts
            weights -= sum(experts) * (1 - config.num_experts_per_tok / count)
        return CostModel(
            token=2 * weights,
            attention=4 * config.num_hidden_layers * heads * dim,
            scored=2 * config.hidden_size * config.vocab_size,
        )

    def shared(self, tree: TokenTree) -> float:
        """FLOP of the tree: every distinct prefix once."""
        rows = distinct_rows(tree)
        scored = np.unique(rows.of_token[tree.loss_mask & (tree.response_leaves > 0)]).size
        return self.token * rows.count + self.attention * rows.visible + self.scored * scored

    def flat(self, tree: TokenTree) -> float:
        """FLOP of the flat batch: every leaf's path on its own."""
        length = tree.path_length.astype(np.float64)
        visible = float((length * (length + 1) / 2).sum())
        return self.token * tree.logical_tokens + self.attention * visible + self.scored * tree.loss_tokens
