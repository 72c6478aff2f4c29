"""Credit, loss terms and what they compare with: `[algorithm]`, `[roles]`, `[demonstrations]`, `[replay]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from .place import Place
from .section import NonNegativeInt, PositiveInt, Schedule, Section

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class TermConfig(Section):
    name: str
    """Name of the term in metrics, such as `<name>/loss`."""
    objective: str | None = None
    """Objective of the term, as in `algorithm.objective`. Give one of this, `pairs`, `loss` and `divergence`."""
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
    divergence: str | None = None
    """Divergence of the policy from the teacher over the whole vocabulary, a mean over tokens: `forward_kl`,
    `reverse_kl`, `jsd`, `skew_forward_kl`, `skew_reverse_kl` or `total_variation` (docs/kernels.md)."""
    divergence_options: dict[str, Any] = Field(default_factory=dict)
    """`beta` of `jsd`, or `alpha` of the skewed KLs; and `rest` of a teacher with a `url`: false leaves tokens that it
    does not tell out of the sum, in place of one class for all of them."""
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


class ReferenceConfig(Section):
    path: str | None = None
    """Model directory of the reference. Default: the policy at the start of the run."""
    reset_every: NonNegativeInt = 0
    """The reference becomes a copy of the current policy every this many updates; 0: never."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the reference's weights kept at every update, the rest being the policy's. Default: no averaging."""


class NamedTeacherConfig(Section):
    path: str | None = None
    """Model directory of the teacher, which needs the policy's vocabulary. Default of `roles.teacher`: the policy at
    the start of the run."""
    url: str | None = None
    """Instead of a path: address of a server with OpenAI's protocol that tells log-probs of given tokens, such as vLLM
    or `rolltree serve`, for example `http://localhost:8000/v1`; see docs/loop.md."""
    model: str | None = None
    """Name of the teacher on the server of `url`. Default: the only one there."""
    top: Annotated[int, Field(ge=1, le=1000)] = 20
    """Likeliest tokens whose log-probs the server of `url` tells at each place; servers have limits, often 20."""
    at_once: PositiveInt = 32
    """Number of concurrent requests to the server of `url`."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of a request to the server of `url`, in seconds."""
    retries: NonNegativeInt = 4
    """Retries of a request, with growing waits, where the server of `url` is busy, late, failing or unreachable."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key for the server of `url`; not needed for a server without keys."""


class TeacherConfig(NamedTeacherConfig):
    reset_every: NonNegativeInt = 0
    """A teacher without a path becomes a copy of the current policy every this many updates; 0: never."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the weights of a teacher without a path that is kept at every update, the rest being the policy's.
    Default: no averaging."""
    context: str | None = None
    """Text that the teacher reads in place of the problem, for loss terms with `divergence`: `{prompt}` is the problem,
    and any other name in braces a column of its row, such as `{solution}`. Default: the policy's own prompt, which
    demonstrations keep."""


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
    teachers: dict[TeacherName, NamedTeacherConfig] = Field(default_factory=dict)
    """Several teachers by name, each with a `path` or a `url`, in place of `roles.teacher`: a problem has the one that
    `teacher_key` names."""
    teacher_key: str = "task"
    """Column of the data that holds the name of the problem's teacher; `task`: the name of its task."""
    critic: CriticConfig | None = None
    """Critic, needed by `algorithm.advantage` = "gae"."""

    def has(self, role: str) -> bool:
        """Return whether the run has a ``reference``, ``critic`` or at least one ``teacher``."""
        return getattr(self, role) is not None or (role == "teacher" and bool(self.teachers))

    @property
    def all_teachers(self) -> dict[str, NamedTeacherConfig]:
        """The teachers by their keys."""
        alone = {} if self.teacher is None else {"roles.teacher": self.teacher}
        return alone | {f"roles.teachers.{name}": teacher for name, teacher in self.teachers.items()}


class DemonstrationsConfig(Section):
    name: str = "given"
    """Name of the table, by which the selection `demonstrated` and the pairs `chosen_and_rejected` choose it."""
    path: str
    """Prompts and responses, in any form that `data.path` takes; see docs/data.md."""
    subset: str | None = None
    """Subset of a set on the hub, as `data.subset`."""
    split: str | None = None
    """Split of a set on the hub, as `data.split`."""
    prompt_key: str = "prompt"
    """Column with the problem, which is put into `data.template`; or a list of messages, with `data.chat`."""
    response_key: str = "response"
    """Column with the response: a text, or a list of messages that begins and ends with the assistant's, of which these
    are trained on."""
    rejected_key: str | None = None
    """Column with a worse response, which a term compares with the first (`pairs = "chosen_and_rejected"`)."""
    messages_key: str | None = None
    """Column with a whole conversation, instead of a prompt and a response: it is trained on from the assistant's first
    message on."""
    weight_key: str | None = None
    """Column with the weight of the response, or a list with one of each of its tokens and end tokens, 0 for those to
    leave out; the selection `demonstrated` counts them. Default: 1."""
    logprob_key: str | None = None
    """Column with the log-probs of the response's tokens, the end token's last, under the policy that wrote it: a list
    of numbers, needed by objectives that weigh demonstrations by it, such as `pear`."""
    per_step: NonNegativeInt = 8
    """Demonstrations of each step; a loss term trains on them with `select = "demonstrated"`. 0: none, where they are
    those of an earlier stage that prompts are only compared with (`data.disjoint`)."""

    @property
    def place(self) -> Place:
        """Place of the rows."""
        return Place(self.path, "demonstrations.path", self.subset, self.split, "demonstrations.")


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
    cut: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1, such as 0.97: leave out of updates what follows a response's last token that was sampled with a lower
    probability, and responses without one. The loss loses small gradients of these tokens (`filter/cut_gradient`)."""
