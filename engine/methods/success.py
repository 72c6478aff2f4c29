"""Curricula that choose problems, and how many responses to sample, by an estimate of their success rates.

`SuccessRates` is the estimate that they share: a discounted Beta posterior of each problem's success rate, whose prior
is pooled over problems that have the same value of a column, or over all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .candidates import Candidate, Observed, Store

Counts = dict[str, list[float]]
"""Right and wrong responses by key."""
TEXT = 160
"""Characters of a problem that its row of the report has."""


class SuccessRates:
    """Right and wrong responses of each problem, of each value of a column and of all, discounted by age.

    A response is right if its reward before shaping is at least 1. The posterior of a problem is ``Beta(a, b)``, a and
    b its counts, plus those of its value of ``by`` scaled down to at most ``pool`` responses, plus those of all
    problems scaled to ``prior`` responses.

    Args:
        decay: factor of all counts at each step.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, by: str | None, decay: float, prior: float, pool: float) -> None:
        if not 0 < decay <= 1 or prior <= 0 or pool < 0:
            raise ValueError("decay must be above 0 and at most 1, prior above 0 and pool at least 0")
        self._by, self._decay, self._prior, self._pool = by, decay, prior, pool
        self._of_problem: Counts = {}
        self._of_value: Counts = {}
        self._of_all = [1.0, 1.0]
        self._step = 0
        self._history: dict[str, dict[str, Any]] = {}  # rows of `table` by problem, without estimates

    def posterior(self, problem: Candidate) -> tuple[float, float]:
        """Return a and b."""
        return self._beta(problem.id, self._value(problem))

    def _beta(self, problem: str, value: str) -> tuple[float, float]:
        right, wrong = (self._prior * count / sum(self._of_all) for count in self._of_all)
        pooled = self._of_value.get(value, [0.0, 0.0])
        scale = min(1.0, self._pool / max(sum(pooled), 1e-9))
        seen = self._of_problem.get(problem, [0.0, 0.0])
        return right + scale * pooled[0] + seen[0], wrong + scale * pooled[1] + seen[1]

    def observe(self, group: Observed, step: int) -> None:
        """Count the responses of a group that have verdicts."""
        if step > self._step:
            factor = self._decay ** (step - self._step)
            for counts in (*self._of_problem.values(), *self._of_value.values(), self._of_all):
                counts[:] = [factor * counts[0], factor * counts[1]]
            self._of_all = [max(count, 0.5) for count in self._of_all]
            self._step = step
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)]
        right = float((judged >= 1).sum())
        for counts in (
            self._of_problem.setdefault(group.problem.id, [0.0, 0.0]),
            self._of_value.setdefault(self._value(group.problem), [0.0, 0.0]),
            self._of_all,
        ):
            counts[:] = [counts[0] + right, counts[1] + len(judged) - right]
        problem = group.problem
        row = self._history.setdefault(
            problem.id,
            {"text": problem.text[:TEXT], "value": self._value(problem), "tries": 0, "groups": 0, "dropped": 0},
        )
        row["tries"] += len(judged)
        row["groups"] += 1
        row["dropped"] += group.dropped is not None
        row["step"] = step

    def table(self) -> dict[str, Any]:
        """Return for the report: ``by``, and rows of the ``problems`` that were tried and of the ``values`` of ``by``.

        A row has ``mean`` and ``deviation`` of the posterior, and, since the start of the run, the numbers of judged
        responses (``tries``), of ``groups`` and of those ``dropped``, and the last ``step``.
        """
        values: dict[str, dict[str, Any]] = {}
        for row in self._history.values():
            pooled = values.setdefault(
                row["value"], dict.fromkeys(("problems", "tries", "groups", "dropped", "step"), 0)
            )
            pooled["problems"] += 1
            for name in ("tries", "groups", "dropped"):
                pooled[name] += row[name]
            pooled["step"] = max(pooled["step"], row["step"])
        return {
            "by": self._by,
            "problems": [
                {"id": name, **row, **_moments(*self._beta(name, row["value"]))} for name, row in self._history.items()
            ],
            "values": [
                {"value": value, **row, **_moments(*self._beta("", value))} for value, row in sorted(values.items())
            ],
        }

    def _value(self, problem: Candidate) -> str:
        if self._by is None:
            return ""
        return problem.task if self._by == "task" else str(problem.column(self._by))

    def state_dict(self) -> dict[str, Any]:
        """Return all counts."""
        return {"problems": self._of_problem, "values": self._of_value, "all": self._of_all} | {
            "step": self._step,
            "history": self._history,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._of_problem = {key: list(counts) for key, counts in state["problems"].items()}
        self._of_value = {key: list(counts) for key, counts in state["values"].items()}
        self._of_all, self._step = list(state["all"]), int(state["step"])
        self._history = {key: dict(row) for key, row in state["history"].items()}


def _moments(right: float, wrong: float) -> dict[str, float]:
    """Return mean and standard deviation of a Beta distribution."""
    total = right + wrong
    return {"mean": right / total, "deviation": math.sqrt(right * wrong / (total + 1)) / total}


class Posterior:
    """Choose problems by the signal that a group of theirs is expected to have: those of the largest ``p (1 - p)``
    first, p drawn from the posterior of each (Thompson sampling), and equal ones by how seldom they were chosen.

    The mean of ``p (1 - p)`` is the variance of the rewards, to which the expected gradient of group methods is
    proportional (as in PCL, Prompt Curriculum Learning, which chooses p near 1/2). All defaults are inferred.

    Args:
        by: column, or ``task``, whose values share counts; ``a.b`` is the field ``b`` of the column ``a``. None: only
            the mean over all problems is shared. Where problems come once or twice, nothing is learnt of a problem
            alone, and a column must tell which are alike.
        decay, prior, pool: see `SuccessRates`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, by: str | None = None, decay: float = 0.985, prior: float = 2.0, pool: float = 8.0) -> None:
        self._rates = SuccessRates(by, decay, prior, pool)

    def order(self, store: Store) -> list[str]:
        """Return the ids of all problems, the most wanted first."""
        problems = list(store.problems.values())
        drawn = store.rng.beta(*np.array([self._rates.posterior(problem) for problem in problems]).T)
        score = drawn * (1 - drawn) - 1e-3 * np.array([problem.taken for problem in problems])
        return [problems[i].id for i in np.argsort(-score, kind="stable")]

    def observe(self, group: Observed, step: int) -> None:
        """Count a group."""
        self._rates.observe(group, step)

    def success_table(self) -> dict[str, Any]:
        """Return the rows of the report, see `SuccessRates.table`."""
        return self._rates.table()

    def state_dict(self) -> dict[str, Any]:
        return self._rates.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates.load_state_dict(state)


class Greso:
    """GRESO (Zheng et al. 2025, arXiv 2506.02177): pass over a problem whose newest z groups in a row had equal rewards
    with probability ``1 - p**z``, p the exploration probability of its side, solved or unsolved.

    After each step the two probabilities move by ``rate`` so that the share of groups without signal among those that
    were sampled approaches ``easy`` and ``hard``: up below it, down above. A problem that is passed over comes later.

    Inferred: the first probabilities, and that the probabilities move once a step instead of once an iteration of
    several rollouts.

    Args:
        easy, hard: wanted shares of groups that are all solved, or all unsolved.
        begin: exploration probability of both sides at the start.
        rate: change of a probability at each step.

    Raises:
        ValueError: an option is not a share.
    """

    def __init__(self, easy: float = 1 / 12, hard: float = 1 / 6, begin: float = 0.5, rate: float = 0.01) -> None:
        if not all(0 <= share <= 1 for share in (easy, hard, begin, rate)):
            raise ValueError("easy, hard, begin and rate must be from 0 to 1")
        self._shares = {"hard": hard, "easy": easy}
        self._rate = rate
        self._explore = {"hard": begin, "easy": begin}
        self._equal: dict[str, tuple[str, int]] = {}  # by problem: the side and the number of its newest equal groups
        self._seen: list[str] = []  # the side, or an empty text, of each group of the step
        self._step = 0

    def order(self, store: Store) -> Iterator[str]:
        """Yield the problems that are not passed over, then the others."""
        later = []
        for problem in store.problems.values():
            side, count = self._equal.get(problem.id, ("", 0))
            if count and store.rng.random() < 1 - self._explore[side] ** count:
                later.append(problem.id)
            else:
                yield problem.id
        yield from later

    def observe(self, group: Observed, step: int) -> None:
        """Note whether a group had signal; the first group of a step closes the step before."""
        if step != self._step:
            self._adjust()
            self._step = step
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)]
        if not len(judged):
            return
        side = "" if np.ptp(judged) > 0 else "easy" if judged[0] >= 1 else "hard"
        before, count = self._equal.get(group.problem.id, ("", 0))
        self._equal[group.problem.id] = (side, count + 1 if side == before else 1) if side else ("", 0)
        self._seen.append(side)

    def _adjust(self) -> None:
        for side, wanted_share in self._shares.items():
            if self._seen:
                share = self._seen.count(side) / len(self._seen)
                moved = self._explore[side] + (self._rate if share < wanted_share else -self._rate)
                self._explore[side] = min(max(moved, 0.0), 1.0)
        self._seen = []

    def state_dict(self) -> dict[str, Any]:
        """Return the probabilities and what is known of each problem."""
        return {"explore": self._explore, "equal": self._equal, "seen": self._seen, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._explore, self._seen, self._step = dict(state["explore"]), list(state["seen"]), int(state["step"])
        self._equal = {problem: (side, int(count)) for problem, (side, count) in state["equal"].items()}


class Sgpo:
    """sGPO (Sudalairaj et al. 2026, arXiv 2606.08854): one pass profiles every problem, then problems come from easy to
    hard, with a group size of the inverse of the profiled success rate p: ``n = scale / p``.

    Problems that the profile solved always are left out, and of those that it never solved a share is kept. The profile
    is the first pass of the run: its groups are counted, and trained on, where the paper discards them.

    Inferred: that the profile is trained on, ``scale``, the bounds of n, the share of unsolved problems, and that they
    have the most responses.

    Args:
        profile: responses to a problem in the first pass.
        scale: see above.
        least, most: bounds of n.
        unsolved: share of the never solved problems that is kept.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self, profile: int = 4, scale: float = 2.0, least: int = 2, most: int = 16, unsolved: float = 0.25
    ) -> None:
        if profile < 1 or scale <= 0 or not 1 <= least <= most or not 0 <= unsolved <= 1:
            raise ValueError("it needs profile >= 1, scale > 0, 1 <= least <= most and unsolved from 0 to 1")
        self._profile, self._scale, self._least, self._most = profile, scale, least, most
        self._unsolved = unsolved
        self._rate: dict[str, float] = {}

    def order(self, store: Store) -> Iterator[str]:
        """Yield problems without a profile first, then the others from easy to hard, the least often chosen first."""
        yield from (problem for problem in store.problems if problem not in self._rate)
        keep = store.rng.random(len(store.problems)) < self._unsolved
        left = [
            (problem.taken, -self._rate[problem.id], place, problem.id)
            for place, problem in enumerate(store.problems.values())
            if problem.id in self._rate and self._rate[problem.id] < 1 and (self._rate[problem.id] > 0 or keep[place])
        ]
        yield from (problem for *_, problem in sorted(left))

    def wanted(self, problem: Candidate) -> int:
        """Return the number of responses to sample."""
        if problem.id not in self._rate:
            return self._profile
        rate = self._rate[problem.id]
        return min(max(round(self._scale / rate), self._least), self._most) if rate else self._most

    def observe(self, group: Observed) -> None:
        """Note the success rate of a problem's first group."""
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)]
        if len(judged):
            self._rate.setdefault(group.problem.id, float((judged >= 1).mean()))

    def state_dict(self) -> dict[str, Any]:
        """Return the profile."""
        return {"rate": self._rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rate = dict(state["rate"])
