"""From `reward.verifier` to who judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError
from ..parts.resolve import resolve
from ..settings import RewardConfig, TaskConfig
from .interface import FromProgram, Rewards
from .policy import PolicyScorer, Score
from .pool import RewardPool
from .remote import Judge, RewardModel

OWN: dict[str, Callable[..., Rewards]] = {
    "judge": Judge,
    "reward_model": RewardModel,
    "policy": PolicyScorer,
    "program": FromProgram,
}
"""Those that are no verifier in a process of its own."""


def make_rewards(config: RewardConfig, tasks: Sequence[TaskConfig] = (), score: Score | None = None) -> Rewards:
    """Who judges a run's responses.

    Args:
        tasks: for the verifier ``task``.
        score: the engine's, for the verifier ``policy``.

    Raises:
        UserError: it cannot be used, or has no such option.
    """
    if config.verifier not in OWN:
        return RewardPool(config, tasks)
    known: dict[str, dict[str, Any]] = {
        "judge": {"config": config},
        "reward_model": {"config": config},
        "policy": {"score": score},
    }
    given = known.get(config.verifier, {})
    options = {**config.options, **given}
    if taken := set(config.options) & set(given):
        raise UserError(f"reward.verifier = '{config.verifier}' has no option '{min(taken)}'; leave it out.")
    made: Rewards = resolve("reward.verifier", config.verifier, options, known=OWN, options_key="reward.options")
    return made
