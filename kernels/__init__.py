"""rolltree.kernels: exact fused ops for reinforcement learning of language models. No trainer, no model, no IO."""

from .dispatch import BackendError, use_backend
from .linear_logprob import LogprobOutput, linear_logprob
from .policy_loss import Objective, PathIndex, PolicyFields, PolicyLossOutput, policy_loss
from .tree_attention import tree_attention

__all__ = [
    "BackendError",
    "LogprobOutput",
    "Objective",
    "PathIndex",
    "PolicyFields",
    "PolicyLossOutput",
    "linear_logprob",
    "policy_loss",
    "tree_attention",
    "use_backend",
]
