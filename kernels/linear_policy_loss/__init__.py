from .api import linear_policy_loss, linear_terms_loss
from .plan import HeadPlan, plan_policy_loss, plan_terms_loss
from .terms import LogprobTerm, Term, TermsLossOutput

__all__ = [
    "HeadPlan",
    "LogprobTerm",
    "Term",
    "TermsLossOutput",
    "linear_policy_loss",
    "linear_terms_loss",
    "plan_policy_loss",
    "plan_terms_loss",
]
