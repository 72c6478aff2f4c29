"""Rollouts: the interface of an engine that samples trees of responses, and two engines, ``native`` and ``vllm``.

A prompt becomes a `Request`; the engine samples its branches, its program decides which of them fork, rewind or end,
and the finished request holds a `TokenTree`. Read in this order: ``sampling_params`` (how responses are sampled),
``branch`` (the growing tree of one prompt), ``engine`` (the public interface), ``steering`` (the program's answers,
applied to the tree), ``calls`` (tools and judges in threads), ``saving`` (an aborted request as plain values),
``sampler`` (the interface through which a training run samples), then ``native`` or ``vllm``.
"""

from .branch import Request
from .completions import Completion
from .engine import RolloutEngine
from .failing import TooLongError
from .native.cache.kv_cache import KvExhaustedError
from .native.drafts import DraftConfig
from .native.engine import EngineConfig, NativeEngine
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
    "TooLongError",
]
