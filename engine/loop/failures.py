"""What failed in a run, by reason: counted in the metrics, told as it begins, in the summary at the end, and limited.

A step in which nothing succeeded is no step: after so many of them in a row the run stops.
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
from .runtime import Progress


def kind(reason: str) -> str:
    """``timeout``, ``died``, ``not_finite``, ``no_score`` or ``raised``: what a failure is called in the metrics."""
    if reason in ("timeout", "died"):
        return reason
    if "TimeoutError" in reason or "did not return within" in reason:  # of a tool, a judge or an environment
        return "timeout"
    if "the judge gave no score" in reason:
        return "no_score"
    return "not_finite" if "not finite" in reason else "raised"


def unsampled(tree: TokenTree) -> dict[int, str]:
    """The leaves that the engine could not sample to their end, and why; their reward is none."""
    why = tree.meta.get("errors", {})
    return {int(leaf): why.get(int(leaf), "failed") for leaf in np.flatnonzero(tree.status == LeafStatus.FAILED)}


class Failures:
    """Failures of one part of a run: of sampling, or of judging.

    Args:
        name: of its metrics, ``<name>/failed`` and ``<name>/failed_<kind>``.
        what: what fails, in the plural: ``responses could not be sampled``.
        limit: steps in a row without a success after which the run stops.
        key: the configuration key of ``limit``.
        remedy: what to do about it.
    """

    def __init__(self, name: str, what: str, *, limit: int, key: str, remedy: str) -> None:
        self.name, self.what, self.limit, self.key, self.remedy = name, what, limit, key, remedy
        self.in_row = 0
        self.asked = 0
        self.reasons: Counter[str] = Counter()  # one reason of each kind, and how many failed by that kind
        self._example: dict[str, str] = {}

    def record(self, reasons: Sequence[str], asked: int, sums: Sums, console: Progress, *, skipped: int = 0) -> None:
        """A step in which ``asked`` were asked for, one failed for each of ``reasons``, and some were left out.

        Raises:
            RunError: nothing has succeeded for `limit` steps.
        """
        self.asked += asked
        sums.count(f"{self.name}/failed", len(reasons))
        for what, number in Counter(map(kind, reasons)).items():
            sums.count(f"{self.name}/failed_{what}", number)
            if what not in self._example:
                self._example[what] = next(reason for reason in reasons if kind(reason) == what)
                console.note(f"{number} of {asked} {self.what}: {self._example[what]}.")
            self.reasons[what] += number
        if asked:
            self.in_row = self.in_row + 1 if len(reasons) + skipped == asked else 0
        if self.in_row >= self.limit:
            raise RunError(
                f"All {self.what} for {self.in_row} {'steps' if self.in_row > 1 else 'step'} in a row ({self.key}), "
                f"the last with '{reasons[-1] if reasons else 'skipped'}'; {self.remedy}."
            )

    def summary(self) -> str | None:
        """One line for the end of the run, None where nothing failed."""
        if not self.reasons:
            return None
        parts = [f"{number} {self._example[what]}" for what, number in self.reasons.most_common()]
        return f"{self.reasons.total()} of {self.asked} {self.what}: {'; '.join(parts)}."

    def state_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {"in_row": self.in_row, "asked": self.asked, "reasons": dict(self.reasons), "example": self._example}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_row, self.asked = state["in_row"], state["asked"]
        self.reasons, self._example = Counter(state["reasons"]), dict(state["example"])
