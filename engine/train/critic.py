"""The critic of PPO: a decoder with a head of one output and an optimiser of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rolltree.kernels import TermsLossOutput, value_loss

from ..batches.batch import TreeBatch
from ..data.tree import TokenTree
from ..model.decoder import decode
from ..model.roles import write_column
from .config import TrainerConfig
from .group import ALONE, Group
from .trainer import Metrics, Trainer


class Critic:
    """Predicts expected returns of prefixes: scores trees into the column ``value`` and learns from ``value_target``.

    A shared token has one value, computed once; its error is summed over all responses that contain it.

    Args:
        model: a decoder of its own; its language-model head is not used.
        config: of its optimiser.
        clip: limit of a value's change from the scored one, as in PPO implementations (default as in verl); None: none.
        group: the ranks that train it together.
        spread: shards the model over the ranks; called when the head of values is a part of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        clip: float | None = 0.5,
        group: Group = ALONE,
        spread: Callable[[PreTrainedModel], object] | None = None,
    ) -> None:
        self.model, self.clip = model, clip
        size = model.config.get_text_config().hidden_size
        head = model.get_output_embeddings()
        for p in head.parameters():
            p.requires_grad_(False)
        model.value_head = nn.Linear(size, 1).to(model.device, torch.float32)
        nn.init.zeros_(model.value_head.weight)
        nn.init.zeros_(model.value_head.bias)
        if spread is not None:
            spread(model)
        self.trainer = Trainer(model, config, group=group)

    def score(self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch]) -> None:
        """Write the value before every response token of ``batches`` into the column ``value`` of ``trees``."""
        with torch.no_grad():
            for waiting in batches:
                batch = waiting.to(self.model.device)
                write_column(trees, batch, "value", self._values(batch))

    def learn(self, batches: Sequence[TreeBatch], loss_tokens: int) -> Metrics:
        """Make one update towards ``value_target``; the loss is a mean over the logical tokens in the loss.

        Args:
            loss_tokens: their number in the update, on all ranks.

        Returns:
            Metrics as ``{name: (sum, count)}``.

        Raises:
            RunError: as for `Trainer.optim_step`.
        """
        for number, batch in enumerate(batches, start=1):
            self.trainer.accumulate(partial(self._backward, batch, float(loss_tokens)), last=number == len(batches))
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
        hidden = decode(self.model, batch.without_routes()).hidden  # its experts are not the policy's
        values: Tensor = self.model.value_head(hidden.index_select(0, batch.head_row).float())
        return values[:, 0][batch.head_index]
