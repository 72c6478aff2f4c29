"""rolltree.kernels: exact fused ops for reinforcement learning of language models. No trainer, no model, no IO."""

from .dispatch import BackendError, use_backend
from .linear_logprob import LogprobOutput, linear_logprob
from .policy_loss import Objective, PathIndex, PolicyFields, PolicyLossOutput, policy_loss
from .sampling import SampleOutput, sample_tokens
from .tree_attention import tree_attention
from .tree_decode import DecodePlan, tree_decode_attention

__all__ = [
    "BackendError",
    "DecodePlan",
    "LogprobOutput",
    "Objective",
    "PathIndex",
    "PolicyFields",
    "PolicyLossOutput",
    "SampleOutput",
    "linear_logprob",
    "policy_loss",
    "sample_tokens",
    "tree_attention",
    "tree_decode_attention",
    "use_backend",
]
