"""Further policies that a run trains: `[models.NAME]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from .section import NonNegativeInt, Schedule, Section

PolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
METRICS = (
    "actor", "adapter", "eval", "filter", "group", "model", "perf", "policy", "prompt_length", "replay",
    "response_length", "reward", "rollout", "schedule", "timing_s", "training", "tree",
)  # fmt: skip
"""Names that no policy can have, since metrics or files begin with them."""


class PolicyConfig(Section):
    roles: tuple[str, ...] = ()
    """Roles of `rollout.program` that the policy plays. Default: the role of its name."""
    path: str | None = None
    """Model directory that it starts from, with the tokenizer of `model.path`. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """As `model.dtype`, which is the default."""
    lr: PositiveFloat | None = None
    """As `trainer.lr`, which is the default."""
    lr_warmup_steps: NonNegativeInt | None = None
    """As `trainer.lr_warmup_steps`, which is the default."""
    lr_scale: Schedule | None = None
    """As `trainer.lr_scale`, which is the default."""
    lr_scale_options: dict[str, Any] | None = None
    """Options of the schedule function."""
    max_grad_norm: PositiveFloat | None = None
    """As `trainer.max_grad_norm`, which is the default."""
