"""Verifiers and the killable processes they run in."""

from .pool import RewardItem, RewardPool, RewardResult
from .verifiers import extract_answer

__all__ = ["RewardItem", "RewardPool", "RewardResult", "extract_answer"]
