"""All keys of a run's configuration, and what follows from several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from .algorithm import AlgorithmConfig, DemonstrationsConfig, ReplayConfig, RolesConfig
from .policies import PolicyConfig, PolicyName
from .rewards import RewardConfig
from .sampling import DataConfig, ModelConfig, RolloutConfig
from .section import Section
from .training import CheckpointConfig, EvaluationConfig, LoopConfig, PlacementConfig, TrainerSection

LONGEST_NAME = 200
"""Longest name of a run, in bytes; file systems allow 255, and a run appends suffixes to it."""


class RunKeys(Section):
    """The keys of a run, each checked by itself."""

    name: str
    """Name of the run and of its directory."""
    recipe: str | None = None
    """Published method by name, see docs/methods.md: its keys apply where neither the file nor the command line gives
    them. Lists of tables are combined by `name`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Runs one after another, each from the model that the one before exported: tables with a `name` and any keys of
    the configuration; see docs/loop.md."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of all random choices: problems, sampling, order."""
    output_dir: str = "runs"
    """Directory of runs; everything that this run writes is in `<output_dir>/<name>`."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that receive the metrics in addition to `metrics.jsonl`; each needs its own library installed."""
    model: ModelConfig
    models: dict[PolicyName, PolicyConfig] = Field(default_factory=dict)
    """Further policies, by name, each trained on the tokens that it samples; see docs/loop.md."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    roles: RolesConfig = RolesConfig()
    demonstrations: tuple[DemonstrationsConfig, ...] = ()
    """Given responses, trained on together with the rollouts, or alone with `trainer.prompts_per_step` = 0: a table, or
    several."""
    replay: ReplayConfig | None = None
    """Groups of earlier steps, trained on again together with new ones."""

    trainer: TrainerSection = TrainerSection()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("name")
    @classmethod
    def _name_is_a_directory_name(cls, name: str) -> str:
        if name != name.strip() or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError("it names a directory, so it must be a plain name without slashes or surrounding blanks")
        if len(name.encode("utf-8", "replace")) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"it names a directory, so it must be printable and {LONGEST_NAME} bytes long at most")
        return name

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def replayed(self) -> int:
        """Number of groups of a step that `[replay]` draws from the store."""
        return 0 if self.replay is None else round(self.replay.share * self.trainer.prompts_per_step)

    @property
    def judges(self) -> bool:
        """True if the run has responses to judge: rollouts, or answers to held-out problems."""
        return self.trainer.prompts_per_step > 0 or self.evaluation.problems > 0

    @property
    def corrects_lag(self) -> bool:
        """True if the loss is corrected for the lag between sampler and policy."""
        return self.loop.staleness > 0 and self.loop.correction != "none"

    @property
    def rescores(self) -> bool:
        """True if the policy scores the rollouts before it is updated.

        The correction of the lag needs this only with several updates a step: the first starts from that same policy.
        """
        return self.algorithm.old_logprob == "recompute" or (self.corrects_lag and self.trainer.updates > 1)

    @property
    def filters_tokens(self) -> bool:
        """True if sampling leaves tokens out, so that the sampler's log-probs are not those of the full softmax."""
        return self.rollout.top_p < 1 or bool(self.rollout.top_k) or bool(self.rollout.min_p)

    @property
    def longest_sequence(self) -> int:
        """Largest number of tokens of a prompt with its response."""
        return self.data.max_prompt_tokens + max(self.rollout.max_new_tokens, self.evaluation.max_new_tokens or 0)
