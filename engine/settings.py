"""The configuration of a run: every key with its type, default and meaning.

`engine/app/config.py` reads the keys from TOML files and command lines; docs/configuration.md is generated from the
docstrings of the fields.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
    model_validator,
)

from .train.config import TrainerConfig


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


LONGEST_NAME = 200
"""Longest name of a run, in bytes; file systems allow 255, and a run appends suffixes to it."""
VERIFIERS = ("task", "math", "exact", "regex", "code", "judge", "reward_model", "policy", "program")
REWARD_NAMES = ("reward", "verifier")
"""Named rewards that every run may have: the one that counts, and the verifier's before any shaping."""
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # rows, tokens and steps are counted in 32 bits
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def known_verifier(name: str) -> str:
    """Return ``name`` if it names a verifier.

    Raises:
        ValueError: there is no such verifier.
    """
    if name not in VERIFIERS and ":" not in name:
        raise ValueError(f"it must be one of {', '.join(VERIFIERS)}, or file.py:function")
    return name


class LoraConfig(Section):
    rank: PositiveInt = 64
    """Rank of the adapter."""
    alpha: PositiveFloat = 16.0
    """Numerator of the adapter's scale."""
    rslora: bool = True
    """The scale is alpha / sqrt(rank) (rsLoRA); false: alpha / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers with an adapter, by the last part of their names, such as `["q_proj", "v_proj"]`; `all-linear`: all
    except the head. A vision tower's have none."""

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("it must name at least one linear layer")
        return targets


class ModelConfig(Section):
    path: str
    """Hugging Face model directory (safetensors), or a model name on the Hugging Face hub."""
    create: str | None = None
    """`file.py:function` (relative to the TOML file), called as function(config, directory) if `path` is missing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the model's weights and activations; the optimiser always keeps fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` is CUDA if it is available, else the CPU."""
    train_tower: bool = False
    """Train all of a model that takes pictures; by default only its decoder and head are trained, and the vision tower
    stays as it is."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; this saves memory and takes about a third more time."""
    lora: LoraConfig | None = None
    """Train a LoRA adapter (needs `peft`) and leave the model's own weights as they are; see docs/models.md."""
    replay_routes: bool = False
    """For mixtures of experts: record the experts that every token was given to when it was sampled, and train with the
    same ones; see docs/trees.md."""

    @model_validator(mode="after")
    def _tower_is_frozen(self) -> ModelConfig:
        if self.lora is not None and self.train_tower:
            raise ValueError("train_tower trains weights that [model.lora] leaves as they are; leave one of them out")
        return self


class TaskConfig(Section):
    name: str
    """Name of a `reasoning_gym` dataset."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that come from this task, relative to the other tasks' weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `reasoning_gym.create_dataset`."""


class DataConfig(Section):
    tasks: tuple[TaskConfig, ...] = ()
    """`reasoning_gym` tasks whose problems are generated during the run. Give one of `tasks`, `path` and `source`."""
    path: str | None = None
    """Parquet or jsonl file with one problem a row."""
    source: str | None = None
    """Source of problems: `games`, `verifiers`, or `file.py:Class` with a method `next(count)` that returns rows with
    the columns below; see docs/environments.md and docs/architecture.md."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `source`."""
    curriculum: str | None = None
    """Choice of prompts by the results of earlier ones, over `path` or `tasks`: a name in `rolltree methods`, or
    `file.py:Class`, see `engine/methods/curricula.py`. Default: none; `path` is shuffled and `tasks` are mixed."""
    curriculum_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `curriculum`."""
    eval_path: str | None = None
    """Parquet or jsonl file of held-out problems. Default: the last `evaluation.problems` rows of `path`."""
    prompt_key: str = "prompt"
    """Column of `path` with the problem: a text or, with `chat`, a list of messages, each with role and content."""
    answer_key: str = "answer"
    """Column of `path` with the reference answer; `a.b` is the field `b` of the column `a`. If the column `answer` is
    missing, verl's `reward_model.ground_truth` or TRL's `solution` is read."""
    image_key: str | None = None
    """Column of `path` or `source` with the pictures of a problem: one or a list, each a path (relative to the file),
    an encoded file, or a dict with `bytes` or `path`; see docs/pictures.md. Default: only parts of messages are
    pictures."""
    n_key: str | None = None
    """Column of `path` or `source` with the number of responses to a problem. Default: `rollout.n` for all problems."""
    template: str = "{prompt}"
    """Text given to the tokenizer; `{prompt}` is replaced by the problem."""
    chat: bool = False
    """Write prompts with the tokenizer's chat template: a text as one message of the user, messages as they are."""
    tools: tuple[str, ...] = ()
    """Tools that the chat template offers, for `rollout.program` = "environment": `calculator`, `python`, or
    `file.py:function` with type annotations and a docstring."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens; a longer one is an error and is never cut."""

    @field_validator("template")
    @classmethod
    def _template_has_a_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("it must contain {prompt}, the place where the problem goes")
        return template

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [bool(self.tasks), self.path is not None, self.source is not None]
        if sum(given) != 1:
            found = "none of them is" if not any(given) else "both are" if sum(given) == 2 else "all are"
            raise ValueError(f"give one of `data.tasks`, `data.path` and `data.source`, and {found} given")
        if self.eval_path is not None and self.tasks:
            raise ValueError(
                "`data.eval_path` does not go with `data.tasks`, which generate their own held-out problems"
            )
        if self.tools and not self.chat:
            raise ValueError("`data.tools` are offered by the chat template; set `data.chat` to true")
        if self.image_key is not None and self.tasks:
            raise ValueError(
                "`data.image_key` is a column of `data.path` or `data.source`, and `data.tasks` have no pictures"
            )
        if self.n_key is not None and self.tasks:
            raise ValueError("`data.n_key` is a column of `data.path` or `data.source`, and `data.tasks` have none")
        if self.source_options and self.source is None:
            raise ValueError("`data.source_options` apply to `data.source`; name one, or leave them out")
        if self.curriculum_options and self.curriculum is None:
            raise ValueError("`data.curriculum_options` apply to `data.curriculum`; name one, or leave them out")
        if self.curriculum is not None and self.source is not None:
            raise ValueError(
                "`data.curriculum` chooses from `data.path` or `data.tasks`; a `data.source` chooses itself"
            )
        if self.curriculum == "difficulty" and self.tasks:
            raise ValueError(
                "`data.curriculum` = 'difficulty' needs `data.path`: the problems of `data.tasks` come once, before "
                "their difficulty is known"
            )
        return self


class DraftsConfig(Section):
    rows: NonNegativeInt = 0
    """The native backend drafts tokens from earlier texts in decoding steps of at most this many rows; 0: never. The
    sampled tokens stay the same; their log-probs, and so the trained weights, differ by rounding. Models with recurrent
    layers sample without drafts."""
    tokens: PositiveInt = 4
    """Largest number of drafted tokens of a sequence in one decoding step."""
    remembered: Annotated[int, Field(ge=256, lt=2**31)] = 1 << 20
    """Tokens of earlier texts kept to draft from, 28 bytes each; the oldest texts are dropped first."""

    @model_validator(mode="after")
    def _rows_are_set(self) -> Self:
        for name in ("tokens", "remembered"):
            if self.rows == 0 and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"`{name}` has no effect while `rows` is 0; set `rollout.drafts.rows` too, such as 8")
        return self


class RolloutConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """Sampler: `native` uses the trained module itself; `vllm` must be installed and receives the weights each step."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `vllm.LLM`."""
    engines: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes in which `rolltree train` samples, each with an engine of its own; they need Ray, see docs/scale.md.
    0: the run's own process samples."""
    program: str = "flat"
    """Rollout program, which decides where responses branch: a name in `rolltree methods`, or `file.py:Class`."""
    program_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the program."""
    n: Annotated[int, Field(gt=0, le=65536)] = 8
    """Responses to one prompt (leaves of its tree)."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of sampling and of the log-probs in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose total probability is at least this; 1: from all tokens."""
    top_k: PositiveInt | None = None
    """Sample from the k most probable tokens. Default: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Exclude tokens less probable than this share of the most probable token's probability. Default: none."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response; they stay part of it."""
    max_batch_rows: PositiveInt = 512
    """Largest number of sequences decoded together."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the native backend's paged KV cache, in tokens."""
    kept_states: Annotated[int, Field(ge=0, lt=2**31)] = 64
    """States of recurrent layers that the native backend keeps besides those of running sequences, for branches that
    fork, go back or were preempted; without one, tokens are computed again. No effect on other models."""
    compile: bool = False
    """Decode with torch.compile, after some seconds of compilation; on a CPU this is no faster. Not for models with
    recurrent layers."""
    drafts: DraftsConfig = DraftsConfig()


Points = tuple[tuple[NonNegativeInt, float], ...]
Schedule = Annotated[float | Points | str, Field(union_mode="left_to_right")]


class ShapingConfig(Section):
    name: str
    """Shaping function: a name that `rolltree methods` lists, or `file.py:function` that takes a group's tree."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the shaping function."""


class RewardPartConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
    """Name of the part's own value among the rewards, for `reward.shaping`, the advantage and the records."""
    verifier: str
    """Verifier of this part, as `reward.verifier`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier."""
    weight: Schedule = 1.0
    """Factor of the part's value in the reward, which is the sum over the parts that judge a problem; given as
    `algorithm.weight` is."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    when: str | tuple[str, ...] = ()
    """Task or tasks that the part judges: names in `data.tasks`, or values of the column `task` of `data.path` or
    `data.source`. Default: all."""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in REWARD_NAMES:
            raise ValueError("a run has a reward of this name already; choose another")
        return name

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, verifier: str) -> str:
        return known_verifier(verifier)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names in `when`; empty: all tasks."""
        return (self.when,) if isinstance(self.when, str) else self.when

    def judges(self, task: str | None) -> bool:
        return not self.tasks or task in self.tasks


class RewardConfig(Section):
    verifier: str = "task"
    """Verifier of responses: `task` (the dataset's own), `math` (math-verify against the reference answer), `exact`,
    `regex`, `code` (runs the response's program on tests), `judge` or `reward_model` (a model on a server), `policy`
    (the policy's log-probs), `program` (the rollout program's own rewards), or `file.py:function`; see
    docs/rewards.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier."""
    parts: tuple[RewardPartConfig, ...] = ()
    """Several verifiers instead of `verifier`; each has `workers` processes of its own."""
    shaping: tuple[ShapingConfig, ...] = ()
    """Functions applied to the rewards, in this order, before advantages are computed."""
    timeout_s: PositiveFloat = 10.0
    """Longest time of one verification, in seconds; then its worker process is killed."""
    workers: Annotated[int, Field(gt=0, le=1024)] = 2
    """Number of verifier processes."""
    hosts: NonNegativeInt = 0
    """Number of processes that Ray starts for verifiers, each with `workers` of these; 0: the run has its own. See
    docs/scale.md."""
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """If the verifier raises or runs out of time: leave the response out (`drop`), give it the reward 0 (`zero`) or end
    the run (`raise`). Failures are counted in the metrics."""
    max_failed_steps: PositiveInt = 5
    """The run stops after this many steps in a row in which no response was judged."""
    max_unreadable: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Largest share of a file's problems whose reference answers the verifier cannot read; a run with more does not
    start."""

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, verifier: str) -> str:
        return known_verifier(verifier)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        names = [part.name for part in self.parts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two of `reward.parts` are called '{twice[0]}'; give each a name of its own")
        if self.parts and (both := {"verifier", "options"} & self.model_fields_set):
            raise ValueError(
                f"`reward.{max(both)}` does not go with `reward.parts`, which have their own; leave it out, or make it "
                "a part"
            )
        if self.hosts and "policy" in self.verifiers:
            raise ValueError(
                "`reward.hosts` have no rollout engine, which the verifier `policy` asks; set `hosts` to 0, or leave "
                "`policy` out"
            )
        if self.hosts and self.scheduled:
            raise ValueError(
                f"`reward.hosts` do not know the step, which the weight of the part '{self.scheduled[0]}' follows; set "
                "`hosts` to 0, or give the part a number"
            )
        return self

    @property
    def scheduled(self) -> list[str]:
        """Names of the parts whose weight changes with the step."""
        return [part.name for part in self.parts if not isinstance(part.weight, int | float)]

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers of the parts, or the only one."""
        return tuple(part.verifier for part in self.parts) or (self.verifier,)


class TermConfig(Section):
    name: str
    """Name of the term in metrics, such as `<name>/loss`."""
    objective: str | None = None
    """Objective of the term, as in `algorithm.objective`. Give one of this, `pairs` and `loss`."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the objective to change."""
    select: str | None = None
    """Tokens or responses that the term trains on, as in `algorithm.select`."""
    select_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the selection."""
    pairs: str | None = None
    """Pairs of responses that a preference loss compares: a name that `rolltree methods` lists, or `file.py:function`
    that takes a tree."""
    pairs_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the function that chooses pairs."""
    loss: str | None = None
    """Class that computes the term's loss, a name that `rolltree methods` lists or `file.py:Class`; see
    docs/extending.md."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `loss`; with `pairs` those of the preference loss: `kind`, `beta`, `margin`, `label_smoothing`."""
    weight: Schedule = 1.0
    """Factor of the term in the loss, as in `algorithm.weight`."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""

    @field_validator("name")
    @classmethod
    def _name_is_its_own(cls, name: str) -> str:
        if not name.isidentifier() or name in ("actor", "critic", "training"):
            raise ValueError("it must be a word of letters, digits and _, other than actor, critic and training")
        return name

    @model_validator(mode="after")
    def _one_loss(self) -> Self:
        if sum(given is not None for given in (self.objective, self.pairs, self.loss)) != 1:
            raise ValueError(f"the loss term '{self.name}' needs one of `objective`, `pairs` and `loss`")
        if self.pairs is not None and self.select is not None:
            raise ValueError(f"the loss term '{self.name}' has `pairs`, which select responses; leave `select` out")
        return self


class ReferenceConfig(Section):
    path: str | None = None
    """Model directory of the reference. Default: the policy at the start of the run."""
    reset_every: NonNegativeInt = 0
    """The reference becomes a copy of the current policy every this many updates; 0: never."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the reference's weights kept at every update, the rest being the policy's. Default: no averaging."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.reset_every and self.ema is not None:
            raise ValueError("give `roles.reference.reset_every` or `roles.reference.ema`, not both")
        return self


class TeacherConfig(Section):
    path: str
    """Model directory of the teacher, which needs the policy's vocabulary."""


class CriticConfig(Section):
    path: str | None = None
    """Model directory that the critic starts from. Default: `model.path`."""
    lr: PositiveFloat = 1e-5
    """Learning rate of the critic."""
    clip: PositiveFloat | None = 0.5
    """Largest distance of a value from the one scored before the update (PPO's value clipping)."""


class RolesConfig(Section):
    reference: ReferenceConfig | None = None
    """Reference policy, needed by `kl_coef` and preference losses."""
    teacher: TeacherConfig | None = None
    """Teacher, needed by distillation."""
    critic: CriticConfig | None = None
    """Critic, needed by `algorithm.advantage` = "gae"."""


class DemonstrationsConfig(Section):
    path: str
    """Parquet or jsonl file of prompts and responses."""
    prompt_key: str = "prompt"
    """Column with the problem, which is put into `data.template`."""
    response_key: str = "response"
    """Column with the response."""
    logprob_key: str | None = None
    """Column with the log-probs of the response's tokens, the end token's last, under the policy that wrote it: a list
    of numbers, needed by objectives that weigh demonstrations by it, such as `pear`."""
    per_step: PositiveInt = 8
    """Demonstrations of each step; a loss term trains on them with `select = "injected"`."""


class ReplayConfig(Section):
    share: Annotated[float, Field(gt=0, lt=1)]
    """Share of `trainer.prompts_per_step` that are groups of earlier steps, drawn from the store without replacement;
    the rest is sampled. While the store has fewer, a step trains on fewer."""
    keep: str = "every"
    """Trained groups that enter the store: a name that `rolltree methods` lists, or `file.py:function` that takes a
    group's tree with its credit and returns True or False."""
    keep_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `keep`."""
    weight: NonNegativeFloat = 1.0
    """Factor of the credit of replayed groups."""
    age: PositiveInt | None = None
    """Steps for which a group stays in the store. Default: no limit."""
    groups: PositiveInt = 4096
    """Largest number of groups in the store, which is on disk; the oldest leave first."""
    prefer: NonNegativeFloat = 0.0
    """Groups are drawn in proportion to this power of the mean of their tokens' absolute credit; 0: all alike."""
    paths: tuple[str, ...] = ()
    """Files with groups of other runs to begin with: `rollouts/step_*.parquet` of a run, or those of
    `rolltree rollout --record`. Both need this run's tokenizer."""


class AlgorithmConfig(Section):
    objective: str = "grpo"
    """Loss of the policy; `rolltree methods` lists the presets."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the objective to change, such as `eps_high = 0.28`."""
    select: str | None = None
    """Tokens or responses that the objective trains on: a name that `rolltree methods` lists, or `file.py:function`
    that takes a tree. Default: all sampled tokens, or what the objective's paper selects."""
    select_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the selection."""
    weight: Schedule = 1.0
    """Factor of the objective in the loss: a number, points `[[step, value], ...]` with linear interpolation, a
    schedule that `rolltree methods` lists, or `file.py:function` that takes the step and the last step's metrics."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    terms: tuple[TermConfig, ...] = ()
    """Further terms of the loss."""
    old_logprob: Literal["behaviour", "recompute"] = "behaviour"
    """Old log-probs of the ratios after the first update of a step: the sampler's (`behaviour`), or the policy's before
    that update (`recompute`)."""
    advantage: str = "group_norm"
    """Advantage estimator: a name that `rolltree methods` lists, or `file.py:function` that takes the batch's trees.
    Left out, it is `gae` with a critic, and otherwise that of the objective's paper."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator."""
    drop_zero_variance: bool = True
    """Leave a group out of the update, and out of the loss's normalisers, if no loss term has a gradient from it and
    the run has no critic: with group advantages, a group whose rewards are all equal."""


class TrainerSection(Section):
    steps: PositiveInt = 100
    """Steps of the run; each samples a batch of rollouts and updates the policy on it."""
    prompts_per_step: PositiveInt = 32
    """Prompts (trees) in the batch of a step."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps of each step, which divide its batch evenly; above 1 `algorithm.old_logprob` applies."""
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
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a rank waits for the others before the update counts as failed."""
    reshard: bool = True
    """Free the gathered weights of a layer after its forward and gather them again for its backward (FSDP2's
    `reshard_after_forward`)."""

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
    over_sampling: Annotated[float, Field(ge=1, le=64)] = 1.0
    """At staleness 0, prompts sampled for each one that is trained on; the surplus is dropped."""
    temperature_scale: Schedule = 1.0
    """Factor of `rollout.temperature`, given as `algorithm.weight` is."""
    temperature_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
    length_scale: Schedule = 1.0
    """Share of `rollout.max_new_tokens` that responses may use, at most 1, given as `algorithm.weight` is."""
    length_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule function."""
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
    def _surplus_is_dropped_at_once(self) -> Self:
        if self.staleness and self.over_sampling > 1:
            raise ValueError("`loop.over_sampling` is for `loop.staleness` = 0; leave it out, or set staleness to 0")
        return self

    @model_validator(mode="after")
    def _contexts_agree(self) -> Self:
        if self.train_context == "plain" and self.callback is None:
            raise ValueError(
                "`loop.train_context` is about prompts that a `loop.callback` chooses; name one, such as hint_ladder, "
                "or leave it out"
            )
        if self.callback == "hint_ladder" and self.train_context != "plain":
            raise ValueError(
                '`loop.callback` = "hint_ladder" puts responses to several prompts into one group; set '
                '`loop.train_context` to "plain"'
            )
        return self

    def overlaps(self, *, on_cpu: bool) -> bool:
        """Return whether sampling continues while the policy is updated, which needs a copy of the weights."""
        return self.staleness > 0 and (not on_cpu if self.overlap is None else self.overlap)


class EvaluationConfig(Section):
    problems: NonNegativeInt = 512
    """Number of held-out problems, answered greedily; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after the run."""
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
    restarts: NonNegativeInt = 10
    """The run stops if more engines than this are lost between two updates of the weights, more reward hosts without a
    verdict between them, or ranks more often than this without a new step."""


class CheckpointConfig(Section):
    every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Number of newest checkpoints kept on disk."""
    best: str | None = None
    """Metric, such as `eval/accuracy`: the checkpoint where it is highest is kept too; `-name`: where it is lowest."""


class TrainConfig(Section):
    """The configuration of a run, read from its TOML file and the command line."""

    name: str
    """Name of the run and of its directory."""
    recipe: str | None = None
    """Published method by name, see docs/methods.md: its keys apply where neither the file nor the command line gives
    them. Lists of tables are combined by `name`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random choices: problems, sampling, order."""
    output_dir: str = "runs"
    """Directory of runs; everything that this run writes is in `<output_dir>/<name>`."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the metrics in addition to `metrics.jsonl`; each needs its own library installed."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    roles: RolesConfig = RolesConfig()
    demonstrations: DemonstrationsConfig | None = None
    """Given responses, trained on together with the rollouts."""
    replay: ReplayConfig | None = None
    """Groups of earlier steps, trained on again together with new ones."""

    @property
    def replayed(self) -> int:
        """Number of groups of a step that `[replay]` draws from the store."""
        return 0 if self.replay is None else round(self.replay.share * self.trainer.prompts_per_step)

    trainer: TrainerSection = TrainerSection()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def _parts_match(self, tasks: set[str]) -> None:
        for part in self.reward.parts:
            if unknown := sorted(set(part.tasks) - tasks):
                raise ValueError(
                    f"`when` of the part '{part.name}' (`reward.parts`) names '{unknown[0]}', which is not in "
                    f"`data.tasks`; they are {', '.join(sorted(tasks))}"
                )
        left = sorted(t for t in tasks if self.reward.parts and not any(p.judges(t) for p in self.reward.parts))
        if left:
            raise ValueError(f"no part of `reward.parts` judges the task '{left[0]}'; add it to the `when` of one")

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @field_validator("name")
    @classmethod
    def _name_is_a_directory_name(cls, name: str) -> str:
        if name != name.strip() or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError("it names a directory, so it must be a plain name without slashes or surrounding blanks")
        if len(name.encode("utf-8", "replace")) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"it names a directory, so it must be printable and {LONGEST_NAME} bytes long at most")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        rollout, trainer, evaluation = self.rollout, self.trainer, self.evaluation
        if self.loop.train_context == "plain" and self.data.image_key is not None:
            raise ValueError(
                '`loop.train_context` = "plain" exchanges no prompts with pictures (`data.image_key`); leave one out'
            )
        if self.model.replay_routes and rollout.backend == "vllm":
            raise ValueError(
                '`model.replay_routes` needs `rollout.backend` = "native", which records routes; set it, or replay none'
            )
        if self.model.replay_routes and rollout.compile:
            raise ValueError("`rollout.compile` does not record routes; leave it or `model.replay_routes` out")
        if rollout.vllm_options and rollout.backend != "vllm":
            raise ValueError('`rollout.vllm_options` are for `rollout.backend` = "vllm"; set it, or leave them out')
        if self.placement != PlacementConfig() and not rollout.engines and not self.reward.hosts:
            raise ValueError(
                "`placement` is for other processes; set `rollout.engines` or `reward.hosts`, or leave it out"
            )
        if self.placement.per_rank and trainer.ranks == 1:
            raise ValueError("`placement.per_rank` is for `trainer.ranks` above 1; set these, or leave it out")
        if trainer.ranks > 1 and (self.data.image_key is not None or self.model.replay_routes):
            raise ValueError(
                "`data.image_key` and `model.replay_routes` do not go with `trainer.ranks` above 1 yet; set it to 1"
            )
        colocated = self.placement.layout == "colocated"
        if colocated and trainer.ranks > 1:
            raise ValueError('`placement.layout` = "colocated" does not go with `trainer.ranks` above 1; set it to 1')
        if (self.placement.per_engine or colocated) and not rollout.engines:
            raise ValueError(
                "`placement.per_engine` and `placement.layout` are for `rollout.engines`; set these, or leave them out"
            )
        judges = rollout.program in ("hints", "mcts") or ":" in rollout.program
        if rollout.engines and judges and (scheduled := self.reward.scheduled):
            raise ValueError(
                f"the program '{rollout.program}' judges in the processes of `rollout.engines`, which do not know the "
                f"step that the weight of the part '{scheduled[0]}' follows; set `rollout.engines` to 0, or give the "
                "part a number"
            )
        if colocated and self.loop.overlaps(on_cpu=False):
            raise ValueError(
                'engines with `placement.layout` = "colocated" sleep during updates and cannot sample then; set '
                "`loop.overlap` to false"
            )
        if rollout.compile and rollout.backend == "vllm":
            raise ValueError('`rollout.compile` is for `rollout.backend` = "native"; use `rollout.vllm_options`')
        longest = self.data.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)
        sequence = f"the longest sequence (`data.max_prompt_tokens` + `max_new_tokens` = {longest} tokens)"
        if not self.data.tasks and "task" in self.reward.verifiers:
            key = "a verifier of `reward.parts`" if self.reward.parts else "`reward.verifier`"
            raise ValueError(
                f'{key} is "task", which needs `data.tasks`; '
                f"for other prompts set it to one of {', '.join(VERIFIERS[1:])}, or file.py:function"
            )
        if self.data.tasks:
            self._parts_match({task.name for task in self.data.tasks})
        if self.data.source is not None and self.data.eval_path is None and evaluation.problems:
            raise ValueError(
                "`data.source` has no held-out problems; name a file of them in `data.eval_path`, or set "
                "`evaluation.problems` to 0"
            )
        if longest > rollout.kv_tokens:
            raise ValueError(f"{sequence} does not fit in `rollout.kv_tokens` = {rollout.kv_tokens}; raise it")
        if longest > trainer.max_tokens:
            raise ValueError(f"{sequence} does not fit in `trainer.max_tokens` = {trainer.max_tokens}; raise it")
        if trainer.updates_per_step > trainer.prompts_per_step:
            raise ValueError(
                f"`trainer.updates_per_step` = {trainer.updates_per_step} needs at least as many prompts, and "
                f"`trainer.prompts_per_step` is {trainer.prompts_per_step}"
            )
        if self.replay is not None and not 0 < self.replayed < trainer.prompts_per_step:
            raise ValueError(
                f"`replay.share` = {self.replay.share} of `trainer.prompts_per_step` = {trainer.prompts_per_step} is "
                f"{self.replayed} groups, which leaves none {'to draw' if not self.replayed else 'to sample'}; change "
                "one of them"
            )
        if evaluation.every and not evaluation.problems:
            raise ValueError("`evaluation.every` is given but `evaluation.problems` is 0; give both or neither")
        return self
