"""The parts of a run: every object and number that the loop needs, made before it by `rolltree.engine.app.build`.

Only the prompts' sources read keys of the configuration themselves (`DataConfig`). All parts are complete when they are
made; no other code changes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.columns import Array
from ..data.tree import TokenTree
from ..methods.credit import CreditFunction
from ..methods.groups import GroupCallback
from ..methods.schedules import Schedule
from ..methods.shaping import Shaping
from ..model.extrapolation import Trajectory
from ..model.roles import Role
from ..parts.context import Context
from ..programs import RolloutProgram
from ..rewards import Rewards
from ..rollout import SamplingParams
from ..rollout.sampler import Sampler, WeightSource
from ..train.checkpoint import Checkpoint, Saved
from ..train.config import TrainerConfig
from ..train.critic import Critic
from ..train.group import ALONE, Group
from ..train.phases import Span
from ..train.terms import LossTerm
from .budget import Budget
from .demonstrations import Demonstrations
from .metrics import Stopwatch, Sums
from .prompts import Prompt
from .runtime import Progress
from .sources import PromptSource
from .workers import Workers

if TYPE_CHECKING:
    from .replay_store import ReplayStore


Ahead = Callable[[int, TokenTree], object]
"""Scores, in a step, the tree of a ready group, which will be trained in this step or a later one."""


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

    def update(self, trees: list[TokenTree], given: list[TokenTree], step: int, sums: Sums) -> bool:
        """Learn from ``trees`` and ``given``; see `Learner.update`."""
        ...

    def credit(self, trees: Sequence[TokenTree], step: int) -> object:
        """Give ``trees`` their credit; see `Learner.credit`."""
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
        """Return metrics of the devices' utilisation by the updates since the last call, given the step's account."""
        ...


class Trained(Protocol):
    """The trained policy, with which a sampler that has a copy of the weights is compared."""

    def usual_tokens(self) -> Array:
        """Return the tokens [n] int64 of the vocabulary that have no meaning of their own."""
        ...

    def sampled_error(self, trees: Sequence[TokenTree]) -> float:
        """Return the mean absolute difference (nats) between recorded log-probs and those of the policy; see
        `rolltree.engine.model.self_check.sampled_error`."""
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
        inert: sentences about parts of loss terms that never act, told at the first update.
        self_check: compare some responses as a tree and one by one before the first update.
        score_early: roles of fixed weights score each group by itself, and before its batch is complete.
        replay_routes: train with the experts that the rollouts recorded.
        group: the ranks that train together; ``model`` and those of roles and critic are sharded over them.
        context: the run's values that its functions ask for; the learner keeps step and metrics of it up to date.
        merges: the sampler gets the weights of the model's adapter merged into those below it.
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
    replay_routes: bool = False
    inert: Sequence[str] = ()
    group: Group = ALONE
    context: Context = field(default_factory=Context)
    merges: bool = False
    trajectory: Trajectory | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParts:
    """The parts of `Controller`.

    Attributes:
        program: the configured program; ``sampler`` copies it for every job.
        program_name: the configured name, for messages.
        params: sampling parameters before schedules change them.
        over_sampling: factor of `Budget` by the step, at staleness 0.
        callback: the group callback; None accepts all judged groups.
        callback_name: the configured name, for messages.
        trains_plain: responses to another prompt of the callback's are trained under the problem's own.
        max_dropped_batches: most groups that the callback may drop for one step, in batches.
        on_failure: treatment of a response whose verifier failed: drop, zero or raise.
        overlaps: sample in another thread while the policy is updated.
        on_cpu: sampling and training share the cores of one CPU.
        keep_keys: continue with keys that older weights computed.
        colocated: the sampler rests during updates.
        seed: seed of the run; a group's seed follows from it and the ticket.
        trained: the trained policy, with which a sampler that has a copy of its own is compared after each publication;
            None for no comparison.
        others: the samplers of further policies, by name; ``sampler`` asks them for the roles that they play.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    source: PromptSource
    program: RolloutProgram
    program_name: str
    params: SamplingParams
    budget: Budget
    seed: int
    over_sampling: Schedule = 1.0
    callback: GroupCallback | None = None
    callback_name: str | None = None
    trains_plain: bool = False
    max_dropped_batches: int = 16
    on_failure: str = "drop"
    overlaps: bool = False
    on_cpu: bool = False
    keep_keys: bool = False
    colocated: bool = False
    trained: Trained | None = None
    others: Mapping[str, Sampler] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationParts:
    """Held-out problems and their sampling parameters; ``every`` 0 evaluates only before and after the run."""

    problems: Sequence[Prompt]
    params: SamplingParams
    every: int


@dataclass(frozen=True)
class RunOptions:
    """Directory, length and checkpoints of a run.

    Attributes:
        toml: the resolved configuration as text, kept in the directory.
        document: the same configuration as plain values, for trackers.
        trained: the settings that decide the training, for checkpoints; a resumed run must have the same.
        best: metric whose highest checkpoint is kept; "-name" keeps the lowest.
        max_bad_steps: consecutive steps without a sampled response after which the run stops.
        max_failed_steps: consecutive steps without a verdict after which the run stops.
        max_batch_rows: sequences that the engine decodes together.
        remembered_tokens: tokens of earlier rollouts that a resumed run drafts from.
    """

    name: str
    directory: Path
    steps: int
    toml: str
    document: dict[str, Any]
    trained: dict[str, Any]
    trackers: Sequence[str]
    save_every: int
    keep: int
    best: str | None
    max_bad_steps: int
    max_failed_steps: int
    max_batch_rows: int
    remembered_tokens: int


@dataclass(frozen=True)
class Parts:
    """All parts of a run.

    Attributes:
        learner: makes the object that trains, from the run's stopwatch and a function that is called with sentences
            for the user.
        rewards: the verifiers; the run enters them, which starts their processes, and closes them.
        check_rewards: makes the entered ``rewards`` read each known problem once; returns a sentence about those that
            cannot be judged, or an empty text.
        saved: the checkpoint from which a resumed run continues.
        replay: a file of recorded groups to learn from instead of sampling.
        store: groups of earlier steps to train on again.
        context: the run's values that parts outside of the learner ask for.
        workers: starts the run's other processes; the run closes it. None if it has none.
        stateful: objects outside of the learner whose state is in checkpoints; see `LearningParts.stateful`.
    """

    options: RunOptions
    sampling: SamplingParts
    learner: Callable[[Stopwatch, Callable[[str], object]], Learning]
    evaluation: EvaluationParts
    rewards: Rewards
    check_rewards: Callable[[], str]
    demonstrations: Demonstrations
    console: Progress
    saved: Checkpoint | None = None
    replay: Path | None = None
    store: ReplayStore | None = None
    context: Context = field(default_factory=Context)
    workers: Workers | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
