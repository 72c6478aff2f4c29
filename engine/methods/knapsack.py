"""A curriculum that spreads the FLOP of a step over its problems by what each further response is worth."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .candidates import Candidate, Observed
from .success import SuccessRates


class Knapsack:
    """Knapsack RL (Li et al. 2025, arXiv 2509.25849): the numbers of responses n_i to the problems that are sampled
    together maximise ``sum_i V_i(n_i)`` within the FLOP of ``n`` responses to each. With p the success rate, ``V(n) = p
    (1 - p)^2 (1 - p^n - (1 - p)^n)``: the gain by an update, times the chance of right and wrong responses.

    V has diminishing returns, so a response after the other goes to the problem where it adds most for its FLOP.

    Inferred: the mean of V over the posterior of p instead of V at the mean of the last group, by which problems
    without a right response keep a value and need no rule of their own; FLOP as the mean tokens of a problem's
    responses, where the paper counts responses; and all numbers.

    Args:
        n: mean number of responses, if all cost alike.
        least, most: bounds of n_i; decided problems have ``least`` too.
        by, decay, prior, pool: see `SuccessRates` and `Posterior`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        n: int = 8,
        least: int = 2,
        most: int = 64,
        by: str | None = None,
        decay: float = 0.985,
        prior: float = 2.0,
        pool: float = 8.0,
    ) -> None:
        if not 1 <= least <= n <= most:
            raise ValueError("it needs 1 <= least <= n <= most")
        self._mean, self._least, self._most = n, least, most
        self._rates = SuccessRates(by, decay, prior, pool)
        self._length: dict[str, list[float]] = {}  # responses and their tokens, by problem

    def spread(self, problems: Sequence[Candidate]) -> list[int]:
        """Return the number of responses to sample to each of the problems."""
        costs = self._costs(problems)
        betas = [self._rates.posterior(problem) for problem in problems]
        sizes, left = [self._least] * len(problems), (self._mean - self._least) * sum(costs)
        heap = [(-_gain(*beta, self._least) / cost, i) for i, (beta, cost) in enumerate(zip(betas, costs, strict=True))]
        heapq.heapify(heap)
        while heap:
            _, i = heapq.heappop(heap)
            if sizes[i] == self._most or costs[i] > left * (1 + 1e-9):
                continue
            sizes[i] += 1
            left -= costs[i]
            heapq.heappush(heap, (-_gain(*betas[i], sizes[i]) / costs[i], i))
        return sizes

    def _costs(self, problems: Sequence[Candidate]) -> list[float]:
        """Return the mean tokens of a response to each problem; that of all problems where there was none."""
        responses, tokens = (
            (sum(counts) for counts in zip(*self._length.values(), strict=True)) if self._length else (1, 1)
        )
        return [
            max(seen[1] / seen[0] if (seen := self._length.get(problem.id)) else tokens / responses, 1.0)
            for problem in problems
        ]

    def observe(self, group: Observed, step: int) -> None:
        """Count a group."""
        self._rates.observe(group, step)
        lengths = group.tree.response_length
        before = self._length.get(group.problem.id, [0.0, 0.0])
        self._length[group.problem.id] = [before[0] + len(lengths), before[1] + float(lengths.sum())]

    def success_table(self) -> dict[str, Any]:
        """Return the rows of the report, see `SuccessRates.table`."""
        return self._rates.table()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"rates": self._rates.state_dict(), "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state_dict(state["rates"])
        self._length = {problem: list(counts) for problem, counts in state["length"].items()}


def _gain(right: float, wrong: float, n: int) -> float:
    """Return the mean of ``V(n + 1) - V(n) = p (1 - p)^2 (p^n (1 - p) + (1 - p)^n p)`` over ``Beta(right, wrong)``."""
    return _moment(right, wrong, n + 1, 3) + _moment(right, wrong, 2, n + 2)


def _moment(right: float, wrong: float, i: int, j: int) -> float:
    """Return the mean of ``p^i (1 - p)^j``."""
    first = math.lgamma(right + i) - math.lgamma(right) + math.lgamma(wrong + j) - math.lgamma(wrong)
    return math.exp(first + math.lgamma(right + wrong) - math.lgamma(right + wrong + i + j))
