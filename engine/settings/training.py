"""Updates, the loop around them, evaluation, processes and checkpoints: `[trainer]`, `[loop]` and others."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from ..train.config import TrainerConfig
from .section import NonNegativeInt, PositiveInt, Schedule, Section

MOST_OVER_SAMPLING = 64
"""Largest `loop.over_sampling`."""
Accuracy = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainerSection(Section):
    steps: PositiveInt = 100
    """Steps of the run; each samples a batch of rollouts and updates the policy on it."""
    prompts_per_step: NonNegativeInt = 32
    """Prompts (trees) in the batch of a step; 0: nothing is sampled, the run trains on `demonstrations` alone."""
    updates_per_step: PositiveInt = 1
    """Updates (optimiser steps) of one pass over a step's batch, on shares of it that differ by at most one prompt;
    those of a recipe are at most one a prompt. From the second update of a step on, `algorithm.old_logprob` applies."""
    epochs: PositiveInt = 1
    """Passes over the batch of each step, demonstrations included, with the same division into updates each time."""
    lr: PositiveFloat = TrainerConfig.lr
    """Learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = TrainerConfig.lr_warmup_steps
    """Updates over which the learning rate rises linearly from zero; 0: none."""
    lr_scale: Schedule = 1.0
    """Factor of the learning rate, given as `algorithm.weight` is."""
    lr_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    betas: tuple[Beta, Beta] = TrainerConfig.betas
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = TrainerConfig.eps
    """Added by AdamW to the root of the second moment."""
    weight_decay: NonNegativeFloat = TrainerConfig.weight_decay
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = TrainerConfig.max_grad_norm
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    max_tokens: PositiveInt = 16384
    """Largest number of packed tokens in one micro-batch."""
    self_check: bool = True
    """Before the first update, compare some responses computed as a tree with the same computed one by one; if they
    differ, updates share no prefixes. After each update, check that a sampler with a copy of the weights holds those
    that were sent and gives their log-probs; if not, the run stops."""
    max_bad_steps: PositiveInt = TrainerConfig.max_bad_steps
    """The run stops after this many steps in a row with a non-finite loss or gradient, or without sampled responses."""
    ranks: PositiveInt = 1
    """Processes that train together, over which FSDP2 shards all models; above 1 it needs `rollout.engines`, see
    docs/scale.md."""
    tensor: PositiveInt = 1
    """Ranks that compute each micro-batch together, each with a part of the heads, of the feed-forward layers and of
    the vocabulary (tensor parallelism); it divides `ranks`, see docs/scale.md."""
    mirror: bool = False
    """Keep the state of each rank after each update in the memory of its node and of the next rank's, so that the run
    goes on after that update where ranks are lost, not after its newest checkpoint; see docs/scale.md."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a rank waits for the others before the update counts as failed."""
    reshard: bool = True
    """Free the gathered weights of a layer after its forward and gather them again for its backward (FSDP2's
    `reshard_after_forward`)."""

    @property
    def updates(self) -> int:
        """Number of updates of a step."""
        return self.epochs * self.updates_per_step

    def optimizer(self, lr: float | None = None) -> TrainerConfig:
        """Return the optimiser's configuration, with another learning rate if ``lr`` is given."""
        names = [field.name for field in fields(TrainerConfig)]
        return TrainerConfig(**{name: getattr(self, name) for name in names} | ({} if lr is None else {"lr": lr}))


class LoopConfig(Section):
    staleness: Annotated[int, Field(ge=0, le=1024)] = 0
    """Largest number of steps that a group may lag behind the weights it updates; 0: every batch is sampled with
    exactly the weights that it updates."""
    window: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """At staleness above 0, share of the staleness * prompts_per_step groups open beyond a batch that may be trained
    before an older group that is not finished."""
    overlap: bool | None = None
    """At staleness above 0, sample during updates, with a copy of the weights; otherwise sampling pauses. Default: true
    on a GPU, false on a CPU, whose cores the update uses."""
    keep_keys: bool = False
    """After an update, continue unfinished responses with the keys and values of older weights; otherwise these are
    computed again."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """At staleness above 0, tokens are weighted by exp(log-prob before the update - sampler's log-prob); weights above
    `correction_cap` become the cap (`truncate`) or 0 (`mask`)."""
    correction_cap: PositiveFloat = 2.0
    """Largest weight of the correction."""
    over_sampling: Schedule = 1.0
    """At staleness 0, prompts sampled for each group that the batch lacks, 1 to 64, given as `algorithm.weight` is; the
    surplus of a full batch is dropped."""
    over_sampling_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    temperature_scale: Schedule = 1.0
    """Factor of `rollout.temperature`, given as `algorithm.weight` is."""
    temperature_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    length_scale: Schedule = 1.0
    """Share of `rollout.max_new_tokens` that responses may use, at most 1, given as `algorithm.weight` is."""
    length_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    score_early: bool = False
    """Let a reference and a teacher of fixed weights score each group by itself as soon as it is ready, while others of
    its batch are sampled or judged, instead of all groups together when the batch is complete."""
    callback: str | None = None
    """Function that keeps, drops or extends a judged group: a name that `rolltree methods` lists, or `file.py:function`
    that takes a tree. Default: every group is kept."""
    callback_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the callback."""
    train_context: Literal["sampled", "plain"] = "sampled"
    """Prompt under which responses to another prompt of the callback's, such as one with a hint, are trained: the one
    that they were `sampled` under, or the problem's own (`plain`); see docs/loop.md."""
    max_dropped_batches: PositiveInt = 16
    """The run stops if the callback drops more than this many batches' worth of groups for one step."""

    @model_validator(mode="after")
    def _over_sampling_is_in_range(self) -> Self:
        schedule = self.over_sampling
        points = schedule if isinstance(schedule, tuple) else ()
        factors = [schedule] if isinstance(schedule, float) else [factor for _, factor in points]
        if wrong := [factor for factor in factors if not 1 <= factor <= MOST_OVER_SAMPLING]:
            raise ValueError(f"`loop.over_sampling` must be from 1 to {MOST_OVER_SAMPLING}, not {wrong[0]:g}")
        return self

    def overlaps(self, *, on_cpu: bool) -> bool:
        """Return whether sampling continues while the policy is updated, which needs a copy of the weights."""
        return self.staleness > 0 and (not on_cpu if self.overlap is None else self.overlap)


class EvaluationConfig(Section):
    problems: NonNegativeInt = 512
    """Number of held-out problems, answered greedily; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after the run."""
    targets: tuple[Accuracy, ...] = ()
    """Accuracies: the run records the FLOP, the sampled tokens and the seconds at which each was reached and held."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer, in tokens. Default: `rollout.max_new_tokens`."""


class PlacementConfig(Section):
    cluster: str = ""
    """Ray cluster whose nodes run the processes of `rollout.engines`, `trainer.ranks` and `reward.hosts`: `auto` or
    `HOST:PORT`. Empty: Ray is started on this machine and listens on the loopback interface alone."""
    per_rank: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Ray's resources of one rank, which computes with as many threads as it has CPUs. Default: as for `per_engine`."""
    per_engine: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Ray's resources of one engine. Default: `{GPU = 1, CPU = 4}` where `model.device` is a GPU, else `{CPU = 1}`."""
    layout: Literal["split", "colocated"] = "split"
    """`colocated`: engines share the trainer's devices, and sleep while it updates the policy, without keys and with
    their weights in the host's memory; `split`: they have devices of their own."""
    hang_s: PositiveFloat = 120.0
    """An engine is replaced if it takes no step for this many seconds while it has work, or gives no answer; a reward
    host, if it gives no answer."""
    start_s: PositiveFloat = 900.0
    """A process is replaced if it takes longer than this many seconds to start and to load its model, or an engine to
    load weights. One that hangs meanwhile is noticed by this alone, so set it to a few times what a start takes."""
    restarts: NonNegativeInt = 10
    """The run stops if more engines than this are lost between two updates of the weights, more reward hosts without a
    verdict between them, or ranks more often than this without a new step. Where `rollout.engines` has `least` and
    `most`, the losses of each engine are counted alone, and one that leaves with its node is none."""


class CheckpointConfig(Section):
    every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints kept on disk."""
    best: str | None = None
    """Metric, such as `eval/accuracy`: the checkpoint where it is highest is kept too; `-name`: where it is lowest."""
