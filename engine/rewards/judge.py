"""The run's own verifier for rollout programs that judge while they sample."""

from __future__ import annotations

from typing import Any, Self

from .interface import RewardItem, Rewards


class PoolJudge:
    """``judge(text, context)``: the reward of a response by the run's verifier; None where judging failed."""

    def __init__(self) -> None:
        self.pool: Rewards | None = None

    def __call__(self, text: str, context: Any) -> float | None:
        if self.pool is None:
            raise RuntimeError("The run has no verifier yet")
        if self.pool.in_turn:
            raise RuntimeError("The run's verifier needs the engine, and cannot judge while a program samples")
        (result,) = self.pool.score([RewardItem(text, context)])
        return result.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # every group has a program of its own, and all of them one pool
