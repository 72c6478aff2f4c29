"""Makes the `Rewards` that `reward.verifier` or `reward.parts` name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError
from ..parts.context import Context
from ..parts.resolve import resolve
from ..settings import RewardConfig, TaskConfig
from .interface import FromProgram, Rewards
from .parts import RewardParts, task_names
from .policy import PolicyScorer, Score
from .pool import RewardPool
from .remote import Judge, RewardModel
from .rubric import Rubric
from .verdict import Verdict

OWN: dict[str, Callable[..., Rewards]] = {
    "judge": Judge,
    "rubric": Rubric,
    "reward_model": RewardModel,
    "policy": PolicyScorer,
    "program": FromProgram,
    "verdict": Verdict,
}
"""Rewards by name that do not run as verifiers in processes of their own."""


def make_rewards(
    config: RewardConfig,
    tasks: Sequence[TaskConfig] = (),
    score: Score | None = None,
    context: Context | None = None,
    roles: Sequence[str] = (),
) -> Rewards:
    """Return the verifier of a run's responses, to be entered as a context manager.

    Args:
        tasks: the `reasoning_gym` tasks, for the verifier ``task``.
        score: the engine's scoring function, for the verifier ``policy``.
        context: the run's values, which weights may follow.
        roles: the roles of the rollout program, for parts that judge one.

    Raises:
        UserError: the verifier cannot be used, or has no such option.
    """
    context = context or Context()
    if config.parts:
        parts = []
        for part in config.parts:
            alone = config.model_copy(
                update={"verifier": part.verifier, "options": part.options, "group": part.group, "parts": ()}
            )
            try:
                parts.append((part, make_rewards(alone, tasks, score, context)))
            except UserError as error:
                raise UserError(f"The part '{part.name}' (reward.parts) cannot be used: {error}") from error
        return RewardParts(parts, task_names(tasks), context, roles)
    if config.verifier not in OWN:
        return RewardPool(config, tasks)
    by_verifier: dict[str, dict[str, Any]] = {
        "judge": {"config": config},
        "rubric": {"config": config},
        "reward_model": {"config": config},
        "policy": {"score": score},
    }
    run_values = by_verifier.get(config.verifier, {})
    options = {**config.options, **run_values}
    if taken := set(config.options) & set(run_values):
        raise UserError(f"reward.verifier = '{config.verifier}' has no option '{min(taken)}'; leave it out.")
    rewards: Rewards = resolve("reward.verifier", config.verifier, options, parts=OWN, options_key="reward.options")
    return rewards
