"""Who judges responses: verifiers in killable processes, judges and reward models on servers, the policy itself."""

from .answers import extract_answer
from .check import check_references
from .interface import RewardItem, RewardResult, Rewards
from .judge import ProgramVerifier
from .make import make_rewards
from .pool import RewardPool

__all__ = [
    "ProgramVerifier",
    "RewardItem",
    "RewardPool",
    "RewardResult",
    "Rewards",
    "check_references",
    "extract_answer",
    "make_rewards",
]
