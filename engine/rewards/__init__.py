"""Rewards: verifiers in killable processes, judges and reward models on servers, or the policy itself judge responses.

`make_rewards` returns the `Rewards` that `reward.verifier` names, or the weighted sum of several (``parts``). It takes
`RewardItem`s (a response's text and its problem's entry) and returns `RewardResult`s; ``verdicts`` and ``spans`` write
these on the group's tree, where `engine/methods` reads them.

Read ``interface``; then ``pool`` with its processes ``keeper`` and ``worker``; then ``verifiers``, whose math reads
answers by ``answers`` (marks), ``reading`` (notation) and ``mathematics`` (comparison). ``remote`` asks servers,
``policy`` the sampler. ``check`` and ``references`` examine reference answers before a run.
"""

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
