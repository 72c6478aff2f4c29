"""rolltree.engine: reinforcement learning of language models on trees of rollouts.

A prompt is sampled into a tree of responses (`rollout`, steered by `programs`), judged (`rewards`, `tasks`), given
advantages (`methods`), packed with other trees (`data`) and trained on (`model`, `train`); `loop` drives these steps
and `app` builds them from a configuration. Start with `app.build`, then `loop.orchestrator`, `loop.controller` (prompts
to judged trees), `loop.learner` (trees to updates), and `data.tree`, the structure that they share.

Public names load on first use, so importing the package is cheap and needs no extra. Importing it registers
``attn_implementation="rolltree"`` with Hugging Face Transformers, now or when that is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .registration import register_attention

if TYPE_CHECKING:
    from .app.assembly.run import build
    from .app.config import load_config
    from .batches.batch import TreeBatch
    from .batches.cost import CostModel
    from .batches.distribute import distribute
    from .batches.equal_prefixes import share_equal_prefixes
    from .batches.pack import pack
    from .data.segment import LeafStatus, Origin, Segment, Sequence
    from .data.tree import TokenTree
    from .errors import RunError, UserError
    from .loop.orchestrator import Orchestrator
    from .model.fused_layers import fuse_layers, unfuse_layers
    from .model.loading import load_model, load_tokenizer
    from .model.logprob import batch_logprob
    from .model.loss import backward, batch_loss
    from .model.self_check import check_model, skip_check, tree_error
    from .model.sharding import shard
    from .rollout import Completion, DraftConfig, EngineConfig, NativeEngine, Request, SamplingParams
    from .settings import TrainConfig
    from .train.config import TrainerConfig
    from .train.trainer import Trainer

_HOME = {
    "Completion": "rollout",
    "CostModel": "batches.cost",
    "DraftConfig": "rollout",
    "EngineConfig": "rollout",
    "LeafStatus": "data.segment",
    "NativeEngine": "rollout",
    "Orchestrator": "loop.orchestrator",
    "Origin": "data.segment",
    "Request": "rollout",
    "RunError": "errors",
    "SamplingParams": "rollout",
    "Segment": "data.segment",
    "Sequence": "data.segment",
    "TokenTree": "data.tree",
    "TrainConfig": "settings",
    "Trainer": "train.trainer",
    "TrainerConfig": "train.config",
    "TreeBatch": "batches.batch",
    "UserError": "errors",
    "backward": "model.loss",
    "batch_logprob": "model.logprob",
    "batch_loss": "model.loss",
    "build": "app.assembly.run",
    "check_model": "model.self_check",
    "distribute": "batches.distribute",
    "fuse_layers": "model.fused_layers",
    "load_config": "app.config",
    "load_model": "model.loading",
    "load_tokenizer": "model.loading",
    "pack": "batches.pack",
    "shard": "model.sharding",
    "share_equal_prefixes": "batches.equal_prefixes",
    "skip_check": "model.self_check",
    "tree_error": "model.self_check",
    "unfuse_layers": "model.fused_layers",
}

__all__ = [
    "Completion",
    "CostModel",
    "DraftConfig",
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
    "TrainerConfig",
    "TreeBatch",
    "UserError",
    "backward",
    "batch_logprob",
    "batch_loss",
    "build",
    "check_model",
    "distribute",
    "fuse_layers",
    "load_config",
    "load_model",
    "load_tokenizer",
    "pack",
    "shard",
    "share_equal_prefixes",
    "skip_check",
    "tree_error",
    "unfuse_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_attention()
