"""Several teachers, of whom each tree has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...batches.batch import TreeBatch
from ...batches.device import to_device
from ...data.tree import TokenTree
from ..logprob import batch_logprob
from ..roles import Role, write_part
from .repacked import of_trees
from .served import ServedTeacher


class Teachers(Role):
    """Scores each tree by its teacher.

    Args:
        roles: the teachers by name; none has weights that change.
        of: returns the name of a tree's teacher.
        scores: as for `Role`.
        shared: ranks share the teachers in this process, so each of these computes on all ranks or on none.
    """

    def __init__(
        self, roles: Mapping[str, Role], of: Callable[[TokenTree], str], *, scores: bool, shared: bool = False
    ) -> None:
        first = next(iter(roles.values()))
        super().__init__(first.column, first.model, scores=scores)
        self.roles, self._of, self._shared = dict(roles), of, shared

    @property
    def fixed(self) -> bool:
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column for role in self.roles.values() for column in role.columns))

    def divided(self, trees: Sequence[TokenTree]) -> Iterator[tuple[str, Role, list[int]]]:
        """Yield the name, the teacher and the places of the trees of each teacher that has any; and of those that ranks
        share."""
        names = [self._of(tree) for tree in trees]
        for name, role in self.roles.items():
            members = [i for i, other in enumerate(names) if other == name]
            if members or (self._shared and not isinstance(role, ServedTeacher)):
                yield name, role, members

    def score(
        self, trees: Sequence[TokenTree], batches: Sequence[TreeBatch], *, temperature: float
    ) -> list[PreTrainedModel]:
        models = []
        for _, role, members in self.divided(trees):
            if isinstance(role, ServedTeacher):
                role.score([trees[i] for i in members], [], temperature=temperature)
            elif self.scores and members:
                models.append(role.model)
        for batch in batches if self.scores else ():
            self._score_batch(trees, batch, temperature)
        return models

    def _score_batch(self, trees: Sequence[TokenTree], waiting: TreeBatch, temperature: float) -> None:
        """Write the log-probs of the trees whose teachers are in this process."""
        batch = waiting.without_routes()
        for _, role, members in self.divided(waiting.trees):
            if isinstance(role, ServedTeacher):
                continue

            def logprob(other: TreeBatch, model: PreTrainedModel = role.model) -> Tensor:
                temperatures = to_device(other.temperatures(temperature), model.device)
                return batch_logprob(model, other.to(model.device), temperature=temperatures).logprob

            with torch.no_grad():
                values = of_trees(batch, [batch.trees[i] for i in members], logprob)
            for number, of_tree in zip(members, values, strict=True):
                write_part(trees, batch, number, self.column, of_tree)
