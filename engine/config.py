"""The configuration of a run: a TOML file, checked by pydantic, with dotted overrides from the command line."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    path: str
    """A Hugging Face model directory (safetensors) or a hub name."""
    create: str | None = None
    """`file.py:function` (relative to the TOML file) called as function(config, directory) when `path` does not exist."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False


class TaskConfig(Section):
    name: str
    """A `reasoning_gym` dataset name."""
    weight: PositiveFloat = 1.0
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to `reasoning_gym.create_dataset`."""


class DataConfig(Section):
    tasks: tuple[TaskConfig, ...] = ()
    """`reasoning_gym` tasks, generated on the fly; leave empty to read `path`."""
    path: str | None = None
    """A parquet or jsonl file of prompts."""
    eval_path: str | None = None
    """The held-out file; without it the last `evaluation.problems` rows of `path` are held out."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    template: str = "{prompt}"
    """Text given to the tokenizer; `{prompt}` is replaced by the problem."""
    chat: bool = False
    """Wrap the text as one user message in the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 1024


class RolloutConfig(Section):
    program: str = "flat"
    program_options: dict[str, Any] = Field(default_factory=dict)
    n: PositiveInt = 8
    """Responses of one prompt (leaves of its tree)."""
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: PositiveInt | None = None
    min_p: float | None = Field(None, ge=0, lt=1)
    max_new_tokens: PositiveInt = 256
    max_batch_rows: PositiveInt = 512
    """Sequences decoded together."""
    kv_tokens: PositiveInt = 65536
    """Capacity of the paged KV cache, in tokens."""


class RewardConfig(Section):
    verifier: str = "task"
    """`task` (the dataset's own verifier), `math` (math-verify against the answer), `exact`, or `file.py:function`."""
    timeout_s: PositiveFloat = 10.0
    workers: PositiveInt = 2
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """What becomes of a response whose verifier raised or ran out of time; each one is counted."""


class AlgorithmConfig(Section):
    objective: str = "grpo"
    objective_options: dict[str, Any] = Field(default_factory=dict)
    advantage: str = "group_norm"
    drop_zero_variance: bool = True
    """Leave groups whose rewards are all equal out of the update; they are counted."""


class TrainerConfig(Section):
    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 32
    updates_per_step: PositiveInt = 1
    """Optimiser steps on each batch of rollouts; above 1 the old log-probs are those of the sampler."""
    lr: PositiveFloat = 1e-6
    lr_warmup_steps: NonNegativeInt = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    max_tokens: PositiveInt = 16384
    """Packed tokens of one micro-batch."""
    max_bad_steps: PositiveInt = 5
    """Steps in a row with a non-finite loss or gradient after which the run stops."""


class EvaluationConfig(Section):
    problems: NonNegativeInt = 512
    every: NonNegativeInt = 0
    """Steps between evaluations; 0: only before and after."""
    max_new_tokens: PositiveInt | None = None


class CheckpointConfig(Section):
    every: PositiveInt = 50
    keep: PositiveInt = 2


class TrainConfig(Section):
    name: str
    seed: NonNegativeInt = 0
    output_dir: str = "runs"
    """The run lives in `<output_dir>/<name>`."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name
