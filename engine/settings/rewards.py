"""Verifiers: `[reward]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, field_validator

from .section import NonNegativeInt, PositiveInt, Schedule, Section

GROUP_JUDGES = ("majority", "answer_share", "pairwise", "against_one")
"""Verifiers that compare the responses of a group."""
VERIFIERS = (
    "task", "math", "exact", "regex", "code", "judge", "rubric", "reward_model", "policy", "program", *GROUP_JUDGES,
)  # fmt: skip
OF_PARTS = (*VERIFIERS, "verdict")
"""The verifiers of `reward.parts`."""
REWARD_NAMES = ("reward", "verifier")
"""Named rewards that every run may have: the one that counts, and the verifier's before any shaping."""


def known_verifier(name: str, among: Sequence[str] = VERIFIERS) -> str:
    """Return ``name`` if it names a verifier.

    Raises:
        ValueError: there is no such verifier.
    """
    if name not in among and ":" not in name:
        raise ValueError(f"it must be one of {', '.join(among)}, or file.py:function")
    return name


class ShapingConfig(Section):
    name: str
    """Shaping function: a name that `rolltree methods` lists, or `file.py:function` that takes a group's tree."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the shaping function."""


class RewardPartConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
    """Name of the part's own value among the rewards, for `reward.shaping`, the advantage and the records."""
    verifier: str
    """Verifier of this part, as `reward.verifier`; or `verdict`, which compares what the text says with another part's
    value."""
    group: bool = False
    """True if this verifier judges a group's responses together, see `reward.group`."""
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
    when_wrong: str | None = None
    """Name of a part that is judged first: this one judges only responses that it gives less than 1, such as a model
    that is asked about what a rule calls wrong."""
    when_right: str | None = None
    """Name of a part that is judged first: this one judges only responses that it gives at least 1."""
    role: str | None = None
    """Role of `rollout.program` whose text the part judges; a response without one has no value of the part. Default:
    the whole response."""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in REWARD_NAMES:
            raise ValueError("a run has a reward of this name already; choose another")
        return name

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, verifier: str) -> str:
        return known_verifier(verifier, OF_PARTS)

    @property
    def waits_for(self) -> str | None:
        """The part that decides which responses this one judges."""
        return self.when_wrong or self.when_right

    def wants(self, other: float | None) -> bool:
        """Return whether it judges a response to which the part that it waits for gives the value ``other``."""
        if self.waits_for is None:
            return True
        return other is not None and (other >= 1) == (self.when_right is not None)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names in `when`; empty: all tasks."""
        return (self.when,) if isinstance(self.when, str) else self.when

    def judges(self, task: str | None) -> bool:
        return not self.tasks or task in self.tasks


class RewardConfig(Section):
    verifier: str = "task"
    """Verifier of responses: `task` (the dataset's own), `math` (math-verify against the reference answer), `exact`,
    `regex`, `code` (runs the response's program on tests), `judge`, `rubric` (by the problem's criteria) or
    `reward_model` (a model on a server), `policy` (the policy's log-probs), `program` (the rollout program's own
    rewards), `majority`, `answer_share`, `pairwise` or `against_one` (compare the responses of a group), or
    `file.py:function`; see docs/rewards.md."""
    group: bool = False
    """The verifier is a function of yours that judges all responses of a group at once: it gets their texts and the
    problem's row, and returns a verdict for each. `timeout_s` is then the time for a group."""
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

    @property
    def scheduled(self) -> list[str]:
        """Names of the parts whose weight changes with the step."""
        return [part.name for part in self.parts if not isinstance(part.weight, int | float)]

    @property
    def by_group(self) -> bool:
        """True if a verifier compares the responses of a group."""
        return any(judge.group or judge.verifier in GROUP_JUDGES for judge in self.parts or (self,))

    @property
    def verifiers(self) -> tuple[str, ...]:
        """The verifiers of the parts, or the only one."""
        return tuple(part.verifier for part in self.parts) or (self.verifier,)
