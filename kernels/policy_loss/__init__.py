from .api import PolicyLossOutput, policy_loss
from .evaluate import Evaluation, evaluate
from .fields import PathIndex, PolicyFields
from .objective import Objective, aggregation_weight
from .pairs import pair_loss
from .presets import ALIASES, PRESETS
from .reference import SUMS
from .subsets import calm_tokens, entropy_quantile, probability_mask, random_share
from .value import gae, value_loss

__all__ = [
    "ALIASES",
    "PRESETS",
    "SUMS",
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
