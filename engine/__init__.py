"""rolltree.engine: trees of rollouts, from the sampler to the optimiser."""

from .batch import TreeBatch, pack
from .errors import RunError, UserError
from .integrations.transformers import register as _register
from .model import batch_logprob, batch_loss, load_model, load_tokenizer
from .tree import LeafStatus, Origin, Segment, Sequence, TokenTree

_register()

__all__ = [
    "LeafStatus",
    "Origin",
    "RunError",
    "Segment",
    "Sequence",
    "TokenTree",
    "TreeBatch",
    "UserError",
    "batch_logprob",
    "batch_loss",
    "load_model",
    "load_tokenizer",
    "pack",
]
