"""Who judges responses: verifiers in killable processes, judges and reward models on servers, the policy itself."""

from .interface import RewardItem, RewardResult, Rewards
from .judge import ProgramVerifier
from .make import make_rewards
from .pool import RewardPool
from .verifiers import extract_answer

__all__ = ["ProgramVerifier", "RewardItem", "RewardPool", "RewardResult", "Rewards", "extract_answer", "make_rewards"]
