"""The parts of a run: every object and number that the loop needs, made before it by `rolltree.engine.app.build`.

Only the prompts' sources read keys of the configuration themselves (`DataConfig`). All parts are complete when they are
made; no other code changes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..methods.credit import CreditFunction
from ..methods.groups import GroupCallback
from ..methods.schedules import Schedule
from ..methods.shaping import Shaping
from ..model.roles import Role
from ..programs import RolloutProgram
from ..rewards import Rewards
from ..rollout import SamplingParams
from ..rollout.sampler import Sampler
from ..train.checkpoint import Checkpoint
from ..train.config import TrainerConfig
from ..train.critic import Critic
from ..train.group import ALONE, Group
from ..train.terms import LossTerm
from .budget import Budget
from .runtime import Progress
from .sources import Demonstrations, Prompt, PromptSource
from .workers import Workers


@dataclass(frozen=True)
class LearningParts:
    """The parts of `Learner`.

    Attributes:
        credit_name: the configured name of ``credit``, for messages.
        shapings: functions that change rewards before they become credit, each with its name for messages.
        terms: the summands of the loss, each with the schedule of its weight.
        temperature: temperature of sampling and of the log-probs in the loss.
        max_tokens: packed tokens of one micro-batch.
        drop_zero_variance: leave groups out of updates that no loss term and no critic learns from.
        inert: sentences about parts of loss terms that never act, told at the first update.
        self_check: compare some responses as a tree and one by one before the first update.
        replay_routes: train with the experts that the rollouts recorded.
        group: the ranks that train together; ``model`` and those of roles and critic are sharded over them.
        merges: the sampler gets the weights of the model's adapter merged into those below it.
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
    critic: Critic | None
    temperature: float
    updates_per_step: int
    max_tokens: int
    drop_zero_variance: bool
    self_check: bool
    replay_routes: bool = False
    inert: Sequence[str] = ()
    group: Group = ALONE
    merges: bool = False


@dataclass(frozen=True)
class SamplingParts:
    """The parts of `Controller`.

    Attributes:
        program: the configured program; ``sampler`` copies it for every job.
        program_name: the configured name, for messages.
        params: sampling parameters before schedules change them.
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
        trained: the trained model, with which a sampler that has a copy of its own is compared after each publication;
            None for no comparison.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    source: PromptSource
    program: RolloutProgram
    program_name: str
    params: SamplingParams
    budget: Budget
    seed: int
    callback: GroupCallback | None = None
    callback_name: str | None = None
    trains_plain: bool = False
    max_dropped_batches: int = 16
    on_failure: str = "drop"
    overlaps: bool = False
    on_cpu: bool = False
    keep_keys: bool = False
    colocated: bool = False
    trained: PreTrainedModel | None = None


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
        rewards: the verifiers; the run enters them, which starts their processes, and closes them.
        check_rewards: makes the entered ``rewards`` read each known problem once; returns a sentence about those that
            cannot be judged, or an empty text.
        saved: the checkpoint from which a resumed run continues.
        replay: a file of recorded groups to learn from instead of sampling.
        workers: starts the run's other processes; the run closes it. None if it has none.
        stateful: objects whose state is in checkpoints, by the key of the configuration that names each; they have
            ``state_dict`` and ``load_state_dict``.
    """

    options: RunOptions
    sampling: SamplingParts
    learning: LearningParts
    evaluation: EvaluationParts
    rewards: Rewards
    check_rewards: Callable[[], str]
    demonstrations: Demonstrations | None
    console: Progress
    saved: Checkpoint | None = None
    replay: Path | None = None
    workers: Workers | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
