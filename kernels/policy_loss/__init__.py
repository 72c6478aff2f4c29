from .api import PolicyLossOutput, policy_loss
from .fields import PathIndex, PolicyFields
from .objective import PRESETS, Objective, aggregation_weight

__all__ = [
    "PRESETS",
    "Objective",
    "PathIndex",
    "PolicyFields",
    "PolicyLossOutput",
    "aggregation_weight",
    "policy_loss",
]
