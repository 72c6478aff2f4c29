"""Further policies that a run trains: `[models.NAME]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from .algorithm import TermConfig
from .section import NonNegativeInt, Schedule, Section

PolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
METRICS = (
    "actor", "adapter", "data", "eval", "filter", "group", "model", "perf", "policy", "prompt_length", "replay",
    "response_length", "reward", "rollout", "schedule", "timing_s", "training", "tree",
)  # fmt: skip
"""Names that no policy can have, since metrics or files begin with them."""


class PolicyConfig(Section):
    roles: tuple[str, ...] = ()
    """Roles of `rollout.program` that the policy plays. Default: the role of its name."""
    path: str | None = None
    """Model directory that it starts from, with the tokenizer of `model.path`. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Default: `model.dtype`."""
    lr: PositiveFloat | None = None
    """Default: `trainer.lr`."""
    lr_warmup_steps: NonNegativeInt | None = None
    """Default: `trainer.lr_warmup_steps`."""
    lr_scale: Schedule | None = None
    """Default: `trainer.lr_scale`."""
    lr_scale_options: dict[str, Any] | None = None
    """Options of the schedule function."""
    max_grad_norm: PositiveFloat | None = None
    """Default: `trainer.max_grad_norm`."""
    objective: str | None = None
    """Default: `algorithm.objective` with its options and selection. An objective of the policy's own selects as its
    paper does."""
    objective_options: dict[str, Any] | None = None
    """Fields of its own objective to change."""
    terms: tuple[TermConfig, ...] | None = None
    """Default: `algorithm.terms`; an empty list: none."""
