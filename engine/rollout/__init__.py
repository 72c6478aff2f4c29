"""The native rollout engine: continuous batching over a KV cache whose pages form the tree of rollouts."""

from .branch import Completion, Request
from .drafts import DraftConfig
from .engine import RolloutEngine
from .kv_cache import KvExhaustedError
from .native import EngineConfig, NativeEngine
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
