from .api import PolicyLossOutput, policy_loss
from .evaluate import Evaluation, evaluate
from .fields import PathIndex, PolicyFields
from .objective import PRESETS, Objective, aggregation_weight
from .reference import SUMS

__all__ = [
    "PRESETS",
    "SUMS",
    "Evaluation",
    "Objective",
    "PathIndex",
    "PolicyFields",
    "PolicyLossOutput",
    "aggregation_weight",
    "evaluate",
    "policy_loss",
]
