from .api import linear_policy_loss
from .plan import HeadPlan, plan_policy_loss

__all__ = ["HeadPlan", "linear_policy_loss", "plan_policy_loss"]
