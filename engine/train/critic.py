"""The critic of PPO: a decoder with a head of one number, which has an optimiser of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import TermsLossOutput, value_loss

from ..data.batch import TreeBatch
from ..data.pack import pack
from ..data.tree import TokenTree
from ..model.decoder import decode
from ..model.roles import write_column
from .config import TrainerConfig
from .trainer import Metrics, Trainer


class Critic:
    """Expected returns of prefixes: it scores trees into the column ``value`` and learns from ``value_target``.

    A shared token has one value, computed once; its error is that of every response it is part of.

    Args:
        model: a decoder of its own; its language-model head is not used.
        config: of its optimiser.
        clip: how far a value may move from the one it was scored with (Schulman et al. 2017); None: anywhere.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, *, clip: float | None = 0.5) -> None:
        self.model, self.clip = model, clip
        size = model.config.get_text_config().hidden_size
        head = model.get_output_embeddings()
        for p in head.parameters():
            p.requires_grad_(False)
        model.value_head = nn.Linear(size, 1).to(model.device, torch.float32)
        nn.init.zeros_(model.value_head.weight)
        nn.init.zeros_(model.value_head.bias)
        self.trainer = Trainer(model, config)

    def score(self, trees: Sequence[TokenTree], *, max_tokens: int) -> None:
        """Write the value before every response token into the column ``value``; a prefix is computed once."""
        with torch.no_grad():
            for waiting in pack(trees, max_tokens=max_tokens):
                batch = waiting.to(self.model.device)
                write_column(trees, batch, "value", self._values(batch))

    def learn(self, batches: Sequence[TreeBatch]) -> Metrics:
        """One update towards ``value_target``, a mean over the logical tokens in the loss."""
        normalizer = float(sum(batch.loss_tokens for batch in batches))
        for batch in batches:
            self.trainer.accumulate(partial(self._backward, batch, normalizer))
        metrics = self.trainer.optim_step()
        return {name.replace("actor/", "critic/"): value for name, value in metrics.items()}

    def _backward(self, waiting: TreeBatch, normalizer: float) -> TermsLossOutput:
        batch = waiting.to(self.model.device)
        assert batch.path_target is not None
        value, at = self._values(batch), batch.path_target
        out = value_loss(
            value[at],
            batch.columns["value_target"],
            normalizer=normalizer,
            old_value=batch.columns["value"][at],
            clip=self.clip,
            mask=batch.loss_mask[at],
        )
        out.loss.backward()
        return TermsLossOutput(out.loss.detach(), out.metrics, {"critic": out.loss.detach()})

    def _values(self, batch: TreeBatch) -> Tensor:  # [M]
        hidden = decode(self.model, batch).hidden
        values: Tensor = self.model.value_head(hidden.index_select(0, batch.head_row).float())
        return values[:, 0][batch.head_index]
