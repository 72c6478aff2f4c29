from .api import PolicyLossOutput, policy_loss
from .evaluate import Evaluation, evaluate
from .fields import PathIndex, PolicyFields
from .objective import Objective, aggregation_weight
from .presets import PRESETS
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
