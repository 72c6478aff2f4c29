"""The run's verifier for rollout programs that judge while they sample."""

from __future__ import annotations

from typing import Any, Self

from .interface import RewardItem, Rewards


class ProgramVerifier:
    """Judges a response while it is sampled: ``verify(text, context)`` returns its reward, or None if judging failed.

    Args:
        rewards: the run's verifier; it must be started before the first response is judged.
    """

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def __call__(self, text: str, context: Any) -> float | None:
        if self._rewards.in_turn:
            raise RuntimeError("The run's verifier needs the engine, and cannot judge while a program samples")
        (result,) = self._rewards.score([RewardItem(text, context)])
        return result.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # every group has a program of its own, and all share one verifier
