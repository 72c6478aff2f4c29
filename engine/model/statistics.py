"""The policy's own statistics of its distributions at every response token, as columns of the trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..batches.batch import TreeBatch
from ..batches.device import to_device
from ..data.tree import TokenTree
from ..errors import UserError
from .head import head
from .logprob import batch_statistics
from .roles import Role, write_column


class PolicyStatistics(Role):
    """Writes statistics of the head, for credit, selections and losses; costs one forward without gradient.

    Args:
        model: the policy.
        columns: the statistic of each column, as `linear_statistics` names it.
        of_ids: the column of ids whose log-probs a column holds, by the latter; for those -1 it is 0.
        prepare: functions that set the columns of ids.

    Raises:
        UserError: the mean log-prob is asked of a head that caps its logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        columns: Mapping[str, str],
        of_ids: Mapping[str, str] | None = None,
        prepare: Sequence[Callable[[Sequence[TokenTree]], Any]] = (),
    ) -> None:
        super().__init__(next(iter({**columns, **(of_ids or {})})), model, replays_routes=True)
        self._statistics, self._of_ids, self._prepare = dict(columns), dict(of_ids or {}), prepare
        if "mean_logprob" in columns.values() and head(model).softcap is not None:
            raise UserError(
                f"{type(model).__name__} caps its logits, so that the column policy_mean_logprob cannot be computed; "
                "choose a part that does not read it."
            )

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self._statistics, *self._of_ids)

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        device, was_training = self.model.device, self.model.training
        want = [name for name in self._statistics.values() if name != "logprob"]
        want += ["extra_logprob"] if self._of_ids else []
        self.model.eval()
        with torch.no_grad():
            for waiting in batches:
                batch, temperatures = waiting.to(device), to_device(waiting.temperatures(temperature), device)
                ids = [batch.columns[name].long() for name in self._of_ids.values()]
                statistics = batch_statistics(
                    self.model,
                    batch,
                    temperature=temperatures,
                    want=want,
                    extra_ids=torch.stack(ids, 1) if ids else None,
                )
                for column, statistic in self._statistics.items():
                    write_column(trees, batch, column, statistics[statistic])
                for k, column in enumerate(self._of_ids):
                    write_column(trees, batch, column, statistics["extra_logprob"][:, k])
        self.model.train(was_training)
        return [self.model]

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        """Set the columns of ids, -1 on trees that the parts leave alone."""
        for function in self._prepare:
            function(trees)
        for name in self._of_ids.values():
            for tree in trees:
                if name not in tree.columns:
                    tree.set(name, -1)
