"""Rollouts: what every engine offers (`engine.RolloutEngine`), and the engines in ``native`` and ``vllm``."""

from .branch import Completion, Request
from .engine import RolloutEngine
from .native.drafts import DraftConfig
from .native.engine import EngineConfig, NativeEngine
from .native.kv_cache import KvExhaustedError
from .sampling_params import SamplingParams

__all__ = [
    "Completion",
    "DraftConfig",
    "EngineConfig",
    "KvExhaustedError",
    "NativeEngine",
    "Request",
    "RolloutEngine",
    "SamplingParams",
]
