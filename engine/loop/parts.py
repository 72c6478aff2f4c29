"""What a run is made of: every object and number that the loop needs, made beforehand by `rolltree.engine.app.build`.

The loop never reads a configuration. All parts are complete when they are made; none is changed from outside later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ..rollout import RolloutEngine, SamplingParams
from ..train.checkpoint import Checkpoint
from ..train.config import TrainerConfig
from ..train.critic import Critic
from ..train.terms import LossTerm
from .budget import Budget
from .progress import Progress
from .sources import Demonstrations, Prompt, PromptSource


@dataclass(frozen=True)
class LearningParts:
    """What `Learner` is made of.

    Attributes:
        credit_name: the configured name of ``credit``, for messages.
        shapings: functions that change rewards before they become credit, each with the words that name it.
        terms: the summands of the loss, each with the schedule of its weight.
        temperature: of sampling, and of the log-probs that the loss compares with.
        max_tokens: packed tokens of one micro-batch.
        drop_zero_variance: leave groups whose rewards are all equal out of updates.
        self_check: compare some responses as a tree and one by one before the first update.
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


@dataclass(frozen=True)
class SamplingParts:
    """What `Controller` samples and judges with.

    Attributes:
        program: as configured; every request gets a copy.
        program_name: the configured name, for messages.
        params: of a step without schedules.
        callback: decides about judged groups; None accepts all.
        callback_name: the configured name, for messages.
        max_dropped_batches: batches' worth of groups that the callback may drop for one step.
        on_failure: what becomes of a response whose verifier failed: drop, zero or raise.
        overlaps: sampling goes on in a thread of its own while the policy is updated.
        on_cpu: sampling and training share the cores of one CPU.
        keep_keys: go on with keys that older weights computed.
        seed: of the run; what a group samples follows from it and the group's ticket.
    """

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    source: PromptSource
    program: RolloutProgram
    program_name: str
    params: SamplingParams
    budget: Budget
    seed: int
    callback: GroupCallback | None = None
    callback_name: str | None = None
    max_dropped_batches: int = 16
    on_failure: str = "drop"
    overlaps: bool = False
    on_cpu: bool = False
    keep_keys: bool = False


@dataclass(frozen=True)
class EvaluationParts:
    """Held-out problems and how they are answered; ``every`` 0 evaluates only before and after the run."""

    problems: Sequence[Prompt]
    params: SamplingParams
    every: int


@dataclass(frozen=True)
class RunOptions:
    """Where a run lives, how long it goes on, and what it keeps.

    Attributes:
        toml: the resolved configuration as text, kept in the directory.
        document: the same as plain values, for trackers.
        trained: the keys that decide what is learned, for checkpoints; a resumed run must have the same.
        best: metric whose best checkpoint is kept; "-name": the lowest one's.
        max_bad_steps: steps in a row without a response sampled after which the run stops.
        max_failed_steps: steps in a row without a verdict after which the run stops.
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
    """Everything a run is made of.

    Attributes:
        rewards: entered by the run, which starts and ends its processes.
        check_rewards: lets the entered ``rewards`` read each known problem once, and returns a sentence about those
            that cannot be judged, or nothing.
        saved: the checkpoint that a resumed run goes on from.
        replay: a file of recorded groups to learn from instead of sampling.
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
