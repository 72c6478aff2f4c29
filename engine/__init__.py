"""rolltree.engine: trees of rollouts, from the sampler to the optimiser."""

from .batch import TreeBatch, pack
from .config import TrainConfig, load_config
from .cost import CostModel
from .distribute import distribute
from .errors import RunError, UserError
from .integrations.transformers import register as _register
from .loss import backward
from .model import batch_logprob, batch_loss, load_model, load_tokenizer
from .orchestrator import Orchestrator
from .rollout import Completion, EngineConfig, NativeEngine, Request, SamplingParams
from .self_check import tree_error
from .sharding import shard
from .trainer import Trainer
from .tree import LeafStatus, Origin, Segment, Sequence, TokenTree

_register()

__all__ = [
    "Completion",
    "CostModel",
    "EngineConfig",
    "LeafStatus",
    "NativeEngine",
    "Orchestrator",
    "Origin",
    "Request",
    "RunError",
    "SamplingParams",
    "Segment",
    "Sequence",
    "TokenTree",
    "TrainConfig",
    "Trainer",
    "TreeBatch",
    "UserError",
    "backward",
    "batch_logprob",
    "batch_loss",
    "distribute",
    "load_config",
    "load_model",
    "load_tokenizer",
    "pack",
    "shard",
    "tree_error",
]
