from .api import PolicyLossOutput, policy_loss
from .elements import SUMS
from .evaluate import Evaluation, evaluate
from .fields import PolicyFields, aggregation_weight
from .objective import PRESETS, Objective
from .pairs import WITHOUT_REFERENCE, pair_loss
from .path_index import PathIndex
from .presets import ALIASES, RECONSTRUCTED
from .subsets import calm_tokens, entropy_quantile, probability_mask, random_share
from .value import gae, value_loss

__all__ = [
    "ALIASES",
    "PRESETS",
    "RECONSTRUCTED",
    "SUMS",
    "WITHOUT_REFERENCE",
    "Evaluation",
    "Objective",
    "PathIndex",
    "PolicyFields",
    "PolicyLossOutput",
    "aggregation_weight",
    "calm_tokens",
    "entropy_quantile",
    "evaluate",
    "gae",
    "pair_loss",
    "policy_loss",
    "probability_mask",
    "random_share",
    "value_loss",
]
