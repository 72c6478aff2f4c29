"""Loss terms that compare the policy with a teacher at every token that they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rolltree.kernels import Objective

from ..batches.batch import TreeBatch
from ..data.tree import TokenTree
from ..model.losses.distillation import (
    TEACHER_PROMPT,
    Distilled,
    Seen,
    at_first_targets,
    read_likeliest,
    see,
)
from ..model.roles import Role
from ..model.teachers.served import ServedTeacher
from ..model.teachers.several import Teachers
from ..parts.context import now
from .terms import TokenTerm

COUNTED = Objective(surrogate="nll", aggregation="token_mean")
"""Decides which tokens count and how much: those of an NLL, in a mean over all of them."""


class Teacher:
    """The teacher of the terms of a run, or its teachers, once the run has loaded them."""

    def __init__(self) -> None:
        self.role: Role | None = None

    def __call__(self, batch: TreeBatch) -> list[Seen]:
        """Return what the divergence reads on ``batch``, of each teacher of any of its trees.

        Of a batch without trees, with which a rank waits for others, it is what they read, and nothing counts it.
        """
        if self.role is None:
            raise RuntimeError("The teacher of a loss term is not loaded; `learning_parts` loads it.")
        if not isinstance(self.role, Teachers):
            return [self._of(self.role, batch, range(len(batch.trees)))]
        seen = [self._of(role, batch, members, name) for name, role, members in self.role.divided(batch.trees)]
        if not batch.trees:
            return [part._replace(name="") for part in seen[:1]] or [read_likeliest(batch, [])]
        return [part for part in seen if part.target is None or len(part.target)]

    @staticmethod
    def _of(role: Role, batch: TreeBatch, members: Sequence[int], name: str = "") -> Seen:
        if isinstance(role, ServedTeacher):
            return read_likeliest(batch, members, name)
        return see(role, batch, members, name)


@dataclass(frozen=True)
class DivergenceTerm(TokenTerm):
    """The mean of a divergence from ``teacher`` over tokens; ``options`` are those of `linear_divergence`: kind, beta,
    alpha; and ``rest`` of `linear_topk_divergence`."""

    teacher: Teacher = field(default_factory=Teacher)
    options: dict[str, Any] = field(default_factory=dict)
    reads: Callable[[TokenTree], Sequence[int]] | None = None
    """Returns the prompt that the teacher reads for a tree; None: the policy's."""

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        super().prepare(trees)
        if self.reads is not None:
            for tree in (tree for tree in trees if "demonstrations" not in tree.meta):
                tree.meta[TEACHER_PROMPT] = self.reads(tree)

    def now(self) -> DivergenceTerm:
        return replace(self, options=now(self.options))

    def on(  # type: ignore[override]
        self, batch: TreeBatch, normalizer: float, on_policy: bool, weight: float
    ) -> Distilled:
        fields = batch.fields(self.objective, select=None if self.select is None else self.name)
        weights = fields.weight if fields.token_weight is None else fields.weight * fields.token_weight
        weights = weights if fields.mask is None else torch.where(fields.mask, weights, 0)
        placed = at_first_targets(weights, batch.head_index)
        return Distilled(self.teacher, placed, self.options, normalizer, weight, self.name)
