"""The configuration of a run: every key with its type, default and meaning.

`engine/app/config.py` reads the keys from TOML files and command lines; docs/configuration.md is generated from the
docstrings of the fields. Begin with `RunKeys` in `keys.py`; `TrainConfig` in `run.py` has the same keys, checked
against each other by the table in `capabilities/`.
"""

from .algorithm import (
    AlgorithmConfig,
    CriticConfig,
    DemonstrationsConfig,
    NamedTeacherConfig,
    ReferenceConfig,
    ReplayConfig,
    RolesConfig,
    TeacherConfig,
    TermConfig,
)
from .place import Place
from .policies import PolicyConfig
from .rewards import REWARD_NAMES, VERIFIERS, RewardConfig, RewardPartConfig, ShapingConfig, known_verifier
from .run import TrainConfig
from .sampling import DataConfig, DraftsConfig, LoraConfig, ModelConfig, RolloutConfig, TaskConfig
from .section import Section
from .training import CheckpointConfig, EvaluationConfig, LoopConfig, PlacementConfig, TrainerSection

__all__ = [
    "REWARD_NAMES",
    "VERIFIERS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DemonstrationsConfig",
    "DraftsConfig",
    "EvaluationConfig",
    "LoopConfig",
    "LoraConfig",
    "ModelConfig",
    "NamedTeacherConfig",
    "Place",
    "PlacementConfig",
    "PolicyConfig",
    "ReferenceConfig",
    "ReplayConfig",
    "RewardConfig",
    "RewardPartConfig",
    "RolesConfig",
    "RolloutConfig",
    "Section",
    "ShapingConfig",
    "TaskConfig",
    "TeacherConfig",
    "TermConfig",
    "TrainConfig",
    "TrainerSection",
    "known_verifier",
]
