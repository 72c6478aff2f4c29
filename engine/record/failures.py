"""Failures in a run, by reason: counted in the metrics, noted at their first occurrence, summarised at the end.

The run stops after a limited number of steps in a row in which nothing succeeded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.segment import LeafStatus
from ..data.tree import TokenTree
from ..errors import RunError
from .metrics import Sums
from .progress import Progress


def kind(reason: str) -> str:
    """Return a failure's name in the metrics: ``timeout``, ``died``, ``not_finite``, ``no_score``, ``cut_off`` or
    ``raised``."""
    if reason in ("timeout", "died"):
        return reason
    if "TimeoutError" in reason or "did not return within" in reason:  # from a tool, a judge or an environment
        return "timeout"
    if "the judge gave no score" in reason:
        return "no_score"
    if "the judge's answer was cut off" in reason:
        return "cut_off"
    return "not_finite" if "not finite" in reason else "raised"


def unsampled(tree: TokenTree) -> dict[int, str]:
    """Return the leaves that the engine could not sample to their end, with the reasons; they have no reward."""
    why = tree.meta.get("errors", {})
    return {int(leaf): why.get(int(leaf), "failed") for leaf in np.flatnonzero(tree.status == LeafStatus.FAILED)}


class Failures:
    """Failures of one part of a run: sampling or judging.

    Args:
        name: prefix of the metrics ``<name>/failed`` and ``<name>/failed_<kind>``.
        what: description of the failure in the plural: ``responses could not be sampled``.
        limit: number of steps in a row without a success after which the run stops.
        key: configuration key of ``limit``.
        remedy: advice for the error message.
    """

    def __init__(self, name: str, what: str, *, limit: int, key: str, remedy: str) -> None:
        self.name, self.what, self.limit, self.key, self.remedy = name, what, limit, key, remedy
        self.in_row = 0
        self.attempts = 0
        self.reasons: Counter[str] = Counter()  # number of failures of each kind
        self._example: dict[str, str] = {}

    @classmethod
    def of_rollouts(cls, limit: int) -> Failures:
        return cls(
            "rollout",
            "responses could not be sampled",
            limit=limit,
            key="trainer.max_bad_steps",
            remedy="look into the weights and the last rollouts",
        )

    @classmethod
    def of_rewards(cls, limit: int) -> Failures:
        return cls(
            "reward",
            "responses could not be judged",
            limit=limit,
            key="reward.max_failed_steps",
            remedy="mend the verifier, or raise reward.timeout_s if it needs longer",
        )

    def record(
        self,
        reasons: Sequence[str],
        attempts: int,
        sums: Sums,
        console: Progress,
        *,
        skipped: int = 0,
        from_start: bool = False,
    ) -> None:
        """Record a step.

        Args:
            reasons: the reason of each failure.
            attempts: number of attempts, of which ``skipped`` were left out.
            from_start: nothing succeeds later where nothing does in the run's first step.

        Raises:
            RunError: nothing has succeeded for `limit` steps, or in the first step ``from_start``.
        """
        first = from_start and self.attempts == 0
        self.attempts += attempts
        sums.count(f"{self.name}/failed", len(reasons))
        for what, number in Counter(map(kind, reasons)).items():
            sums.count(f"{self.name}/failed_{what}", number)
            if what not in self._example:
                self._example[what] = next(reason for reason in reasons if kind(reason) == what)
                console.note(f"{number} of {attempts} {self.what}: {self._example[what]}.")
            self.reasons[what] += number
        if attempts:
            self.in_row = self.in_row + 1 if len(reasons) + skipped == attempts else 0
        if first and self.in_row:
            raise RunError(
                f"All {self.what} in the first step, the last with '{reasons[-1]}'; mend the agent or its limits, as "
                "further steps would end so too."
            )
        if self.in_row >= self.limit:
            raise RunError(
                f"All {self.what} for {self.in_row} {'steps' if self.in_row > 1 else 'step'} in a row ({self.key}), "
                f"the last with '{reasons[-1] if reasons else 'skipped'}'; {self.remedy}."
            )

    def summary(self) -> str | None:
        """Return one line for the end of the run, or None if nothing failed."""
        if not self.reasons:
            return None
        parts = [f"{number} {self._example[what]}" for what, number in self.reasons.most_common()]
        return f"{self.reasons.total()} of {self.attempts} {self.what}: {'; '.join(parts)}."

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, as JSON values."""
        return {"in_row": self.in_row, "asked": self.attempts, "reasons": dict(self.reasons), "example": self._example}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts that `state_dict` returned."""
        self.in_row, self.attempts = state["in_row"], state["asked"]
        self.reasons, self._example = Counter(state["reasons"]), dict(state["example"])
