"""The interface of the object that trains the policy, and the parts of which `Learner` is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ..data.tree import TokenTree
from ..methods.credit import CreditFunction
from ..methods.schedules import Schedule
from ..methods.shaping import Shaping
from ..model.roles import Role
from ..parts.context import Context
from ..record.metrics import Sums
from ..rollout import SamplingParams
from ..rollout.sampler import WeightSource
from ..tasks.images import Image
from ..train.checkpoint import Saved
from ..train.config import TrainerConfig
from ..train.critic import Critic
from ..train.group import ALONE, Group
from ..train.phases import Span
from ..train.terms import LossTerm
from .extrapolation import Trajectory

Ahead = Callable[[int, TokenTree], object]
"""Scores, in a step, the tree of a ready group, which will be trained in this step or a later one."""


Gather = Callable[[Sequence[TokenTree]], list[int]]
"""Fetches the tokens of trees that are elsewhere (`StoredTree`); returns the places of those that are gone."""


class RanksLostError(RuntimeError):
    """The ranks that train were started anew and have lost their state: the run must go back to its checkpoint."""


class Learning(Protocol):
    """Turns judged trees into updates of the policy: `Learner` in this process, or `Ranks` in others.

    `Ranks` raises `RanksLostError` from any method.
    """

    @property
    def updates(self) -> int:
        """Number of updates of the policy."""
        ...

    @property
    def policies(self) -> Mapping[str, Learning]:
        """The learners of further policies, by name; empty for a run of one policy."""
        ...

    @property
    def ahead(self) -> Ahead | None:
        """The function that scores a group before its batch is complete; None where all are scored together."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this process on which the policy is trained; the CPU if others train it."""
        ...

    def sampling(self, step: int, params: SamplingParams) -> SamplingParams:
        """Return ``params`` with the temperature and the maximum length of ``step``."""
        ...

    def update(self, trees: list[TokenTree], demonstrations: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn from ``trees`` and ``demonstrations``; see `Learner.update`."""
        ...

    def credit(self, trees: Sequence[TokenTree], step: int) -> object:
        """Give ``trees`` their credit; see `Learner.credit`."""
        ...

    @property
    def gather(self) -> Gather | None:
        """The function that fetches trees to where they will be trained; None where all trees are in this process."""
        ...

    def record(
        self,
        directory: Path,
        step: int,
        trees: Sequence[TokenTree],
        texts: Sequence[Sequence[str]],
        images: Sequence[Sequence[Image]],
    ) -> None:
        """Write the rollouts of ``step``; arguments as for `write_step`."""
        ...

    def weights(self) -> WeightSource:
        """Return the source of the policy's weights, for a sampler."""
        ...

    def save(self, directory: Path) -> Saved:
        """Write the learner's part of a checkpoint."""
        ...

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory that plain transformers loads."""
        ...

    def states(self) -> dict[str, Any]:
        """Return the states of the learner's functions that have one, by the keys of the configuration."""
        ...

    def restore(self, states: Mapping[str, Any]) -> None:
        """Give the functions the states that `states` returned."""
        ...

    def spans(self) -> list[Span]:
        """Return the phases of the updates since the last call, in order."""
        ...

    def utilization(self, times: dict[str, float]) -> dict[str, float]:
        """Return metrics of what was computed since the last call, given the step's account; see `Compute.read`."""
        ...


@dataclass(frozen=True)
class LearningParts:
    """The parts of `Learner`.

    Attributes:
        credit_name: the configured name of ``credit``, for messages.
        shapings: functions that change rewards before they become credit, each with its name for messages.
        roles: score rollouts.
        given_roles: score demonstrations, in columns that terms read; one with weights of its own is in `roles` too.
        terms: the summands of the loss, each with the schedule of its weight.
        temperature: temperature of sampling and of the log-probs in the loss.
        updates_per_step: updates of one pass over a batch.
        epochs: passes over a batch.
        max_tokens: packed tokens of one micro-batch.
        drop_zero_variance: leave groups out of updates that no loss term and no critic learns from.
        cut: probability; ends of responses in which no token was sampled with a lower one are left out of updates.
        notes: sentences about what of the configuration has no effect or is not needed, told at the first update.
        self_check: compare some responses as a tree and one by one before the first update.
        score_early: roles of fixed weights score each group by itself, and before its batch is complete.
        replay_routes: train with the experts that the rollouts recorded.
        group: the ranks that train together; ``model`` and those of roles and critic are sharded over them.
        context: the run's values that its functions ask for; the learner keeps step and metrics of it up to date.
        weights: makes the source of the sampler's weights, where it does not get all that the trainer has.
        trajectory: keeps the model's adapter during the run, to extend the exported weights.
        stateful: those of the functions whose state is in checkpoints, by the key of the configuration that names each;
            they have ``state_dict`` and ``load_state_dict``.
    """

    model: PreTrainedModel
    optimizer: TrainerConfig
    credit: CreditFunction
    credit_name: str
    shapings: Sequence[tuple[str, Shaping]]
    terms: Sequence[tuple[LossTerm, Schedule]]
    lr_scale: Schedule
    temperature_scale: Schedule
    length_scale: Schedule
    roles: Sequence[Role]
    given_roles: Sequence[Role]
    critic: Critic | None
    temperature: float
    updates_per_step: int
    epochs: int
    max_tokens: int
    drop_zero_variance: bool
    self_check: bool
    score_early: bool = False
    cut: float = 1.0
    replay_routes: bool = False
    notes: Sequence[str] = ()
    group: Group = ALONE
    context: Context = field(default_factory=Context)
    weights: Callable[[PreTrainedModel], WeightSource] | None = None
    trajectory: Trajectory | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
