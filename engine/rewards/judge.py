"""The run's verifier for rollout programs that judge while they sample."""

from __future__ import annotations

import threading
from typing import Any, Self

from .interface import RewardItem, Rewards


class ProgramVerifier:
    """Judges a response while it is sampled: ``verify(text, context)`` returns its reward, or None if judging failed.

    Args:
        rewards: the run's verifier; it must be started before the first response is judged.
        starts: start it when the first response is judged, since nothing else in this process uses it.
    """

    def __init__(self, rewards: Rewards, *, starts: bool = False) -> None:
        self._rewards, self._starts, self._lock = rewards, starts, threading.Lock()

    def __call__(self, text: str, context: Any) -> float | None:
        if self._rewards.in_turn:
            raise RuntimeError("The run's verifier needs the engine, and cannot judge while a program samples")
        with self._lock:
            if self._starts:
                self._rewards.__enter__()
                self._starts = False
        (result,) = self._rewards.score([RewardItem(text, context)])
        return result.value

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # every group has a program of its own, and all share one verifier
