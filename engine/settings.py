"""The keys of a run's configuration: what may be said, its type, its default and its meaning, each in one place.

`engine/app/config.py` reads them from TOML files and command lines.
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
"""Bytes of a run's name; file systems take 255, and a run adds endings of its own."""
VERIFIERS = ("task", "math", "exact", "regex", "code", "judge", "reward_model", "policy", "program")
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # rows, tokens and steps are counted in 32 bits
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory (safetensors) or a hub name."""
    create: str | None = None
    """`file.py:function` (relative to the TOML file), called as function(config, directory) when `path` is missing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type the model computes in; the optimiser always keeps fp32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where there is one, else cpu."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class TaskConfig(Section):
    name: str
    """A `reasoning_gym` dataset name."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that come from this task, relative to the other tasks' weights."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `reasoning_gym.create_dataset`."""


class DataConfig(Section):
    tasks: tuple[TaskConfig, ...] = ()
    """`reasoning_gym` tasks, generated on the fly; leave empty to read `path`."""
    path: str | None = None
    """A parquet or jsonl file of prompts."""
    source: str | None = None
    """`games`, `verifiers`, or `file.py:Class` whose `next(count)` gives the problems, rows with the columns below; see
    docs/environments.md and docs/architecture.md."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    eval_path: str | None = None
    """The held-out file; without it the last `evaluation.problems` rows of `path` are held out."""
    prompt_key: str = "prompt"
    """Column of `path` that holds the problem: a text, or with `chat` a list of messages, each a role and content."""
    answer_key: str = "answer"
    """Column of `path` that holds the reference answer; `a.b` is the field `b` of the column `a`. Rows without the
    column `answer` may keep it as verl does (`reward_model.ground_truth`) or as TRL does (`solution`)."""
    n_key: str | None = None
    """Column of `path` or `source` that says how many responses a problem gets; unset, all get `rollout.n`."""
    template: str = "{prompt}"
    """Text given to the tokenizer; `{prompt}` is replaced by the problem."""
    chat: bool = False
    """Write prompts by the tokenizer's chat template: a text as one message of the user, messages as they are."""
    tools: tuple[str, ...] = ()
    """Tools that the chat template offers, for `rollout.program` = "environment": `calculator`, `python`, or
    `file.py:function` with types and a docstring."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is an error, never cut."""

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
        if self.n_key is not None and self.tasks:
            raise ValueError("`data.n_key` is a column of `data.path` or `data.source`, and `data.tasks` have none")
        if self.source_options and self.source is None:
            raise ValueError("`data.source_options` are of `data.source`; name one, or leave them out")
        return self


class DraftsConfig(Section):
    rows: NonNegativeInt = 0
    """The native backend guesses tokens from earlier texts in steps of at most this many rows, and samples the same
    tokens; their log-probs, and so the weights, differ by rounding. 0: never."""
    tokens: PositiveInt = 4
    """Guessed tokens a sequence and step, at most."""
    remembered: Annotated[int, Field(ge=256, lt=2**31)] = 1 << 20
    """Tokens of earlier texts to guess from, 28 bytes each; the oldest texts are dropped first."""

    @model_validator(mode="after")
    def _rows_are_set(self) -> Self:
        for name in ("tokens", "remembered"):
            if self.rows == 0 and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"`{name}` has no effect while `rows` is 0; set `rollout.drafts.rows` too, such as 8")
        return self


class RolloutConfig(Section):
    backend: Literal["native", "vllm"] = "native"
    """What samples: the trained module itself, or vLLM, which has to be installed and gets the weights each step."""
    vllm_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `vllm.LLM`."""
    program: str = "flat"
    """Who branches, and where: a name that `rolltree methods` lists, or `file.py:Class` of your own."""
    program_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the program."""
    n: Annotated[int, Field(gt=0, le=65536)] = 8
    """Responses of one prompt (leaves of its tree)."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of sampling, and of the log-probs that training compares with."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: PositiveInt | None = None
    """Sample from the k most probable tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Leave out tokens less probable than this share of the most probable one."""
    max_new_tokens: PositiveInt = 256
    """Longest response, in tokens."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, which keeps them."""
    max_batch_rows: PositiveInt = 512
    """Sequences decoded together."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the native backend's paged KV cache, in tokens."""
    compile: bool = False
    """Sample with torch.compile, after some seconds of compilation; on a CPU steps are no faster."""
    drafts: DraftsConfig = DraftsConfig()


Points = tuple[tuple[NonNegativeInt, float], ...]
Schedule = Annotated[float | Points | str, Field(union_mode="left_to_right")]


class ShapingConfig(Section):
    name: str
    """A name that `rolltree methods` lists, or `file.py:function` of a group's tree."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""


class RewardConfig(Section):
    verifier: str = "task"
    """`task` (the dataset's own verifier), `math` (math-verify against the answer), `exact`, `regex`, `code` (tests of
    the response's program), `judge` or `reward_model` (behind a server), `policy` (its own log-probs), `program` (what
    the rollout program gave), or `file.py:function`; see docs/rewards.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    shaping: tuple[ShapingConfig, ...] = ()
    """What is done with its rewards before they become credit, one after the other."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one verification may take before its worker is killed."""
    workers: Annotated[int, Field(gt=0, le=1024)] = 2
    """Verifier processes."""
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """What becomes of a response whose verifier raised or ran out of time; each one is counted."""
    max_failed_steps: PositiveInt = 5
    """Steps in a row without a single verdict after which the run stops."""
    max_unreadable: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Largest share of a file's problems whose reference answers the verifier cannot read; a run with more does not
    start."""

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, verifier: str) -> str:
        if verifier not in VERIFIERS and ":" not in verifier:
            raise ValueError(f"it must be one of {', '.join(VERIFIERS)}, or file.py:function")
        return verifier


class TermConfig(Section):
    name: str
    """Of its metrics, such as `<name>/loss`."""
    objective: str | None = None
    """Its objective, as `algorithm.objective`; or give `pairs`."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the objective to change."""
    select: str | None = None
    """Which tokens or responses it sees: a name that `rolltree methods` lists, or `file.py:function` of a tree."""
    select_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    pairs: str | None = None
    """Which responses a preference loss compares: a name that `rolltree methods` lists, or `file.py:function`."""
    pairs_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Of the preference loss: `kind`, `beta`, `margin`, `label_smoothing`."""
    weight: Schedule = 1.0
    """What it is multiplied with: a number, `[[step, value], ...]`, or a function as for `algorithm.weight`."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""

    @field_validator("name")
    @classmethod
    def _name_is_its_own(cls, name: str) -> str:
        if not name.isidentifier() or name in ("actor", "critic", "training"):
            raise ValueError("it must be a word of letters, digits and _, other than actor, critic and training")
        return name

    @model_validator(mode="after")
    def _one_loss(self) -> Self:
        if (self.objective is None) == (self.pairs is None):
            raise ValueError(f"the loss term '{self.name}' needs either `objective` or `pairs`")
        if self.pairs is not None and self.select is not None:
            raise ValueError(f"the loss term '{self.name}' has `pairs`, which say what it sees; leave `select` out")
        return self


class ReferenceConfig(Section):
    path: str | None = None
    """A model directory; without it the policy as the run began."""
    reset_every: NonNegativeInt = 0
    """Updates after which it becomes the policy of that moment; 0: never."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of its weights kept at every update, the rest being the policy's."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.reset_every and self.ema is not None:
            raise ValueError("give `roles.reference.reset_every` or `roles.reference.ema`, not both")
        return self


class TeacherConfig(Section):
    path: str
    """A model directory with the policy's vocabulary."""


class CriticConfig(Section):
    path: str | None = None
    """A model directory to begin with; without it the policy's."""
    lr: PositiveFloat = 1e-5
    """Learning rate."""
    clip: PositiveFloat | None = 0.5
    """How far a value may move from the one it was scored with."""


class RolesConfig(Section):
    reference: ReferenceConfig | None = None
    """For `kl_coef` and preference losses."""
    teacher: TeacherConfig | None = None
    """For distillation."""
    critic: CriticConfig | None = None
    """For `algorithm.advantage` = "gae"."""


class DemonstrationsConfig(Section):
    path: str
    """A parquet or jsonl file of prompts and responses."""
    prompt_key: str = "prompt"
    """Column of the problem; it goes into `data.template`."""
    response_key: str = "response"
    """Column of the response."""
    per_step: PositiveInt = 8
    """Demonstrations of each update; terms see them by `select = "injected"`."""


class AlgorithmConfig(Section):
    objective: str = "grpo"
    """The loss; `rolltree methods` lists the presets."""
    objective_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of the objective to change, such as `eps_high = 0.28`."""
    select: str | None = None
    """Which tokens or responses the objective sees: a name that `rolltree methods` lists, or `file.py:function`."""
    select_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    weight: Schedule = 1.0
    """What the objective is multiplied with: a number, `[[step, value], ...]`, a name that `rolltree methods` lists, or
    `file.py:function` of the step and the last step's metrics."""
    weight_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""
    terms: tuple[TermConfig, ...] = ()
    """Further terms of the loss."""
    old_logprob: Literal["behaviour", "recompute"] = "behaviour"
    """What ratios compare with after the first update of a step: the sampler's log-probs, or the policy's before it."""
    advantage: str = "group_norm"
    """How rewards become credit: a name that `rolltree methods` lists, or `file.py:function` of the batch's trees."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    drop_zero_variance: bool = True
    """Leave groups whose rewards are all equal out of the update; they are counted."""


class TrainerSection(Section):
    steps: PositiveInt = 100
    """Rounds of rollouts and update."""
    prompts_per_step: PositiveInt = 32
    """Prompts (trees) sampled for each step."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps on each batch of rollouts; above 1 the old log-probs are those of the sampler."""
    lr: PositiveFloat = TrainerConfig.lr
    """Learning rate of AdamW."""
    lr_warmup_steps: NonNegativeInt = TrainerConfig.lr_warmup_steps
    """Steps over which the learning rate rises linearly from zero."""
    lr_scale: Schedule = 1.0
    """What the learning rate is multiplied with: as `algorithm.weight`."""
    lr_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""
    betas: tuple[Beta, Beta] = TrainerConfig.betas
    """AdamW's decay of the first and second moment."""
    weight_decay: NonNegativeFloat = TrainerConfig.weight_decay
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = TrainerConfig.max_grad_norm
    """The gradient is scaled down to this norm."""
    max_tokens: PositiveInt = 16384
    """Packed tokens of one micro-batch."""
    self_check: bool = True
    """Before the first update compare some responses as a tree and one by one; share nothing if they differ."""
    max_bad_steps: PositiveInt = TrainerConfig.max_bad_steps
    """Steps in a row with a non-finite loss or gradient, or without a response sampled, after which the run stops."""

    def optimizer(self, lr: float | None = None) -> TrainerConfig:
        """Return the optimiser's numbers, with another learning rate if one is given."""
        names = [field.name for field in fields(TrainerConfig)]
        return TrainerConfig(**{name: getattr(self, name) for name in names} | ({} if lr is None else {"lr": lr}))


class LoopConfig(Section):
    staleness: Annotated[int, Field(ge=0, le=1024)] = 0
    """Steps a group may lag behind the weights it updates; 0: every batch is sampled by the very weights it updates."""
    window: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of the staleness * prompts_per_step groups beyond a batch that may overtake one that is not finished."""
    overlap: bool | None = None
    """At staleness above 0, sample while the policy is updated, with a copy of its weights; else sampling rests. Where
    it is not given: on a GPU; the cores of a CPU are busy with the update."""
    keep_keys: bool = False
    """Go on with keys that older weights computed; otherwise those of unfinished responses are computed again."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """At staleness above 0, tokens weigh exp(policy before the update - sampler): at most the cap, or 0 beyond it."""
    correction_cap: PositiveFloat = 2.0
    """Largest such weight."""
    over_sampling: Annotated[float, Field(ge=1, le=64)] = 1.0
    """At staleness 0, prompts sampled for each one that is trained on; what is left over is dropped."""
    temperature_scale: Schedule = 1.0
    """What `rollout.temperature` is multiplied with: as `algorithm.weight`."""
    temperature_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""
    length_scale: Schedule = 1.0
    """The share of `rollout.max_new_tokens` that responses may take, at most 1: as `algorithm.weight`."""
    length_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function."""
    callback: str | None = None
    """What becomes of a judged group: a name that `rolltree methods` lists, or `file.py:function` of a tree."""
    callback_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to it."""
    max_dropped_batches: PositiveInt = 16
    """Batches' worth of groups that the callback may drop for one step before the run stops."""

    @model_validator(mode="after")
    def _surplus_is_dropped_at_once(self) -> Self:
        if self.staleness and self.over_sampling > 1:
            raise ValueError("`loop.over_sampling` is for `loop.staleness` = 0; above, the buffer holds more anyhow")
        return self

    def overlaps(self, *, on_cpu: bool) -> bool:
        """Whether sampling goes on while the policy is updated, and needs weights of its own."""
        return self.staleness > 0 and (not on_cpu if self.overlap is None else self.overlap)


class EvaluationConfig(Section):
    problems: NonNegativeInt = 512
    """Held-out problems answered greedily; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer; `rollout.max_new_tokens` if not given."""


class CheckpointConfig(Section):
    every: PositiveInt = 50
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept on disk."""
    best: str | None = None
    """A metric, as `eval/accuracy`: the checkpoint where it is highest is kept too; `-name`: where it is lowest."""


class TrainConfig(Section):
    """A run: what its TOML file and the command line say."""

    name: str
    """Name of the run, and of its directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: problems, sampling, order."""
    output_dir: str = "runs"
    """The run lives in `<output_dir>/<name>`."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the metrics go beside `metrics.jsonl`, each by its own library."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    roles: RolesConfig = RolesConfig()
    demonstrations: DemonstrationsConfig | None = None
    """Given responses beside the rollouts."""
    trainer: TrainerSection = TrainerSection()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

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
        if rollout.vllm_options and rollout.backend != "vllm":
            raise ValueError('`rollout.vllm_options` are for `rollout.backend` = "vllm"; set it, or leave them out')
        if rollout.compile and rollout.backend == "vllm":
            raise ValueError('`rollout.compile` is for `rollout.backend` = "native"; vLLM compiles by its own options')
        longest = self.data.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)
        sequence = f"the longest sequence (`data.max_prompt_tokens` + `max_new_tokens` = {longest} tokens)"
        if rollout.n == 1 and self.algorithm.drop_zero_variance:
            raise ValueError(
                "with `rollout.n` = 1 every group has equal rewards and `algorithm.drop_zero_variance` drops it; "
                "raise `rollout.n` to 2 or more, or set `algorithm.drop_zero_variance` to false"
            )
        if not self.data.tasks and self.reward.verifier == "task":
            raise ValueError(
                '`reward.verifier` is "task", which needs `data.tasks`; '
                f"for other prompts set it to one of {', '.join(VERIFIERS[1:])}, or file.py:function"
            )
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
        if evaluation.every and not evaluation.problems:
            raise ValueError("`evaluation.every` is given but `evaluation.problems` is 0; give both or neither")
        return self
