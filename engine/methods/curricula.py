"""Curricula choose the prompts of a run by what is known of the earlier ones.

A curriculum is a class with at least one of these methods:

- ``order(store)`` returns or yields ids of ``store.problems``, the most wanted first; it may be called to look ahead,
  so it changes nothing. With `data.path` the store has every problem, with `data.tasks` the next unused ones of each
  task. Without it, prompts come in the order that they have without a curriculum.
- ``gate(problem)`` returns False to pass over a `Candidate`.
- ``wanted(problem)`` returns the number of responses to sample for a `Candidate`; None: as without a curriculum.
- ``spread(problems)``, in place of ``wanted``, returns those of all `Candidate` that are chosen together, which are a
  step's at staleness 0.

``observe(group)`` is optional and is called after each step for every group that was trained or dropped, see
`Observed`. ``state_dict()`` and ``load_state_dict(state)`` are optional and exchange plain values with a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import UserError
from .candidates import Candidate, Observed, Store
from .knapsack import Knapsack
from .priors import Values
from .success import Greso, Posterior, Sgpo

FINER = ("node_advantage", "token_advantage", "path_advantage")
"""Columns of credit that replace the credit of whole responses."""


class Ucb:
    """DUMP (Wang et al. 2025): choose arms, which are tasks, by an upper confidence bound of their mean absolute
    advantage: ``score_d = mean |A| + c sqrt(2 ln(N + 1) / (n_d + 1))``, n_d observed groups of arm d, N of all arms;
    each prompt's arm is drawn with the probabilities ``softmax(score / temperature)``.

    Inferred: the form of the bound, that n counts groups, that the window holds the mean |A| of the newest groups of
    an arm, and all defaults.

    Args:
        by: ``task``, or a column whose values are the arms; a column ``task`` takes precedence over the task's name.
        window: newest groups of an arm that count.
        c: weight of the bound's second part.
        temperature: of the softmax.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, by: str = "task", window: int = 32, c: float = 1.0, temperature: float = 0.1) -> None:
        if window < 1 or c < 0 or temperature <= 0:
            raise ValueError("window must be at least 1, c at least 0 and temperature above 0")
        self._by, self._window, self._c, self._temperature = by, window, c, temperature
        self._seen: dict[str, int] = {}  # groups of each arm
        self._recent: dict[str, list[float]] = {}  # mean |A| of its newest groups

    def order(self, store: Store) -> Iterator[str]:
        """Draw an arm and yield its first problem, until an arm has none left."""
        queues: dict[str, deque[str]] = {}
        for problem in store.problems.values():
            queues.setdefault(self._arm(problem), deque()).append(problem.id)
        if len(queues) == 1:
            raise UserError(
                f"data.curriculum = 'ucb' has one arm, '{next(iter(queues))}', and nothing to choose; give several "
                "data.tasks, or another column by data.curriculum_options.by."
            )
        arms = sorted(queues)
        scores = np.array([self._score(arm) for arm in arms]) / self._temperature
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        while queue := queues[arms[store.rng.choice(len(arms), p=chances)]]:
            yield queue.popleft()

    def observe(self, group: Observed) -> None:
        """Count a group; one without a verdict has no advantage and is not counted."""
        tree = group.tree
        if finer := [name for name in FINER if name in tree.columns]:
            raise UserError(
                f"data.curriculum = 'ucb' needs an advantage of whole responses, and algorithm.advantage gives "
                f"{finer[0]}; use another, such as 'group_norm'."
            )
        judged = ~np.isnan(tree.rewards["reward"])
        if judged.any():
            arm = self._arm(group.problem)
            self._seen[arm] = self._seen.get(arm, 0) + 1
            size = float(np.abs(tree.advantage[judged].astype(np.float64)).mean())
            self._recent[arm] = [*self._recent.get(arm, []), size][-self._window :]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and windows of all arms."""
        return {"seen": self._seen, "recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._recent = dict(state["seen"]), dict(state["recent"])

    def _score(self, arm: str) -> float:
        recent = self._recent.get(arm, [])
        mean = sum(recent) / len(recent) if recent else 0.0
        total, seen = sum(self._seen.values()), self._seen.get(arm, 0)
        return mean + self._c * math.sqrt(2 * math.log(total + 1) / (seen + 1))

    def _arm(self, problem: Candidate) -> str:
        if self._by in problem.entry:
            return str(problem.entry[self._by])
        if self._by == "task":
            return problem.task
        raise UserError(
            f"The prompt '{problem.id}' has no column '{self._by}' (data.curriculum_options.by); name one of "
            f"{', '.join(sorted(problem.entry))}, or 'task'."
        )


class Difficulty:
    """Choose only problems whose mean reward so far is in ``[low, high]``, and those that were never judged (as in
    Interplay and MedVLThinker; the defaults are inferred). A problem that is passed over is not sampled again.

    Args:
        low, high: bounds of the mean reward before shaping, the success rate for rewards of 0 and 1.

    Raises:
        ValueError: ``low`` is above ``high``.
    """

    def __init__(self, low: float = 0.1, high: float = 0.9) -> None:
        if low > high:
            raise ValueError("low must not be above high")
        self._low, self._high = low, high

    def gate(self, problem: Candidate) -> bool:
        """Return whether the problem may be chosen."""
        return problem.mean_reward is None or self._low <= problem.mean_reward <= self._high


class Gvm:
    """GVM-RAFT: ``n_i`` in proportion to ``G_i / sqrt(p_i + alpha / p_i**(beta - 1))``, with a mean of ``n``; a
    problem's first group is a pilot, from which p_i and G_i are estimated.

    p_i is the problem's mean reward, within ``[1 / (2 m), 1]`` for m responses; G_i is the mean over its responses of
    the norm of the gradient of the log-prob with respect to the logits, the root of ``sum_t (1 - 2 p + sum_v p_v^2)``.
    Inferred: the form, this norm for that of all weights, the least p_i, the mean over the problems seen so far instead
    of a step's, and all defaults.

    Args:
        n: mean number of responses.
        pilot: responses to a problem that was not seen.
        alpha, beta: of the formula.
        most: largest number of responses.

    Raises:
        ValueError: an option is out of range.
    """

    reads = ("policy_logprob", "policy_sum_p2")

    def __init__(self, n: int = 8, pilot: int = 4, alpha: float = 1e-3, beta: float = 2.0, most: int = 32) -> None:
        if min(n, pilot, most) < 1 or alpha < 0:
            raise ValueError("n, pilot and most must be at least 1, and alpha at least 0")
        self._n, self._pilot, self._alpha, self._beta, self._most = n, pilot, alpha, beta, most
        self._seen: dict[str, list[float]] = {}  # by problem: responses, sum of rewards, sum of norms

    def wanted(self, problem: Candidate) -> int:
        """Return the number of responses to sample."""
        if problem.id not in self._seen:
            return self._pilot
        mean = sum(map(self._score, self._seen)) / len(self._seen)
        share = self._score(problem.id) / mean if mean else 1.0
        return max(1, min(round(self._n * share), self._most))

    def observe(self, group: Observed) -> None:
        """Add a group; one that was not scored, or has a response without a verdict, does not count."""
        tree = group.tree
        rewards = tree.rewards.get("verifier", tree.rewards["reward"]).astype(np.float64)
        if "policy_sum_p2" not in tree.columns or np.isnan(rewards).any():
            return
        steep = 1 - 2 * np.exp(tree.policy_logprob.astype(np.float64)) + tree.policy_sum_p2.astype(np.float64)
        steep = np.where(tree.loss_mask, steep, 0.0)
        norms = [math.sqrt(max(steep[tree.response_rows(leaf)].sum(), 0.0)) for leaf in range(tree.num_leaves)]
        count, total, size = self._seen.get(group.problem.id, (0.0, 0.0, 0.0))
        self._seen[group.problem.id] = [count + len(rewards), total + rewards.sum().item(), size + sum(norms)]

    def _score(self, problem: str) -> float:
        count, total, size = self._seen[problem]
        rate = min(max(total / count, 1 / (2 * count)), 1.0)
        return size / count / math.sqrt(rate + self._alpha / rate ** (self._beta - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of each problem."""
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {problem: list(sums) for problem, sums in state["seen"].items()}


class Predicted:
    """V_0 (arXiv 2602.03584): pass over problems that are predicted to be solved always or never, and sample the others
    as often as gives a group right and wrong responses with probability ``chance``: the least n with ``1 - p^n - (1 -
    p)^n >= chance``.

    The rule for n and all defaults are inferred.

    Args:
        column: of the problem's row, with its predicted success rate. None: the mean reward of similar problems in
            earlier steps, see `engine/methods/priors.py`.
        low, high: problems with ``low < p < high`` are chosen; those without a prediction too.
        chance: see above.
        least, most: bounds of n.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        column: str | None = None,
        low: float = 0.05,
        high: float = 0.95,
        chance: float = 0.9,
        least: int = 4,
        most: int = 16,
    ) -> None:
        if not 0 <= low < high <= 1 or not 0 < chance < 1 or not 1 <= least <= most:
            raise ValueError("it needs 0 <= low < high <= 1, chance within (0, 1) and 1 <= least <= most")
        self._column, self._low, self._high = column, low, high
        self._chance, self._least, self._most = chance, least, most
        self._values = Values()

    def gate(self, problem: Candidate, step: int) -> bool:
        """Return whether the problem may be chosen."""
        rate = self._rate(problem, step)
        return rate is None or self._low < rate < self._high

    def wanted(self, problem: Candidate, step: int) -> int | None:
        """Return the number of responses to sample; None without a prediction."""
        rate = self._rate(problem, step)
        if rate is None:
            return None
        enough = (n for n in range(self._least, self._most) if 1 - rate**n - (1 - rate) ** n >= self._chance)
        return next(enough, self._most)

    def observe(self, group: Observed, step: int) -> None:
        """Add the mean reward of a group, if it has verdicts."""
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)].astype(np.float64)
        if self._column is None and len(judged):
            self._values.add(group.problem.id, group.problem.text, float(judged.mean()), step)

    def _rate(self, problem: Candidate, step: int) -> float | None:
        if self._column is None:
            return self._values.predict(problem.text, step)
        return _number(problem, self._column)

    def state_dict(self) -> dict[str, Any]:
        """Return the rewards of earlier groups."""
        return self._values.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.load_state_dict(state)


class HardReplay:
    """Choose every problem once; from then on draw them with weights ``1 / max(mean reward, floor)`` (QwenLong-L1,
    Fleming-R1; the form and ``floor`` are inferred).

    Args:
        floor: least mean reward that divides.

    Raises:
        ValueError: floor is not positive.
    """

    def __init__(self, floor: float = 0.05) -> None:
        if not floor > 0:
            raise ValueError("floor must be positive")
        self._floor = floor

    def order(self, store: Store) -> Iterator[str]:
        """Yield unseen problems in their order, then draw without replacement."""
        problems = list(store.problems.values())
        seen = [problem for problem in problems if problem.mean_reward is not None]
        yield from (problem.id for problem in problems if problem.mean_reward is None)
        weights = np.array([1 / max(problem.mean_reward or 0.0, self._floor) for problem in seen])
        # ordering by E / w with exponential E draws without replacement in proportion to w
        order = np.argsort(store.rng.exponential(size=len(seen)) / weights, kind="stable")
        yield from (seen[i].id for i in order.tolist())


class Hardest:
    """DRIVE: all problems alike up to a step; after it only the hardest, with more responses to each.

    Args:
        after: last step of the first stage.
        keep: share of the judged problems that remain, those of the lowest mean reward (default inferred).
        n: responses to a problem in the second stage.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(self, after: int, keep: float = 0.25, n: int = 64) -> None:
        if after < 0 or not 0 < keep <= 1 or n < 1:
            raise ValueError("it needs after >= 0, keep within (0, 1] and n >= 1")
        self._after, self._keep, self._count = after, keep, n

    def order(self, store: Store, step: int) -> list[str]:
        """Return the problems in their order; of the second stage, the hardest."""
        problems = list(store.problems.values())
        judged = sorted((p.mean_reward, p.id) for p in problems if p.mean_reward is not None)
        if step <= self._after or not judged:
            return [problem.id for problem in problems]
        kept = {name for _, name in judged[: max(1, round(self._keep * len(judged)))]}
        return [problem.id for problem in problems if problem.id in kept]

    def wanted(self, problem: Candidate, step: int) -> int | None:
        """Return the number of responses of the second stage; None in the first."""
        return self._count if step > self._after else None


class Limr:
    """LIMR: after ``epochs`` groups of each problem, keep those whose mean rewards moved as the average's did:
    ``s_i = 1 - sum_k (r_i^k - r^k)^2 / sum_k (1 - r^k)^2 > least``, r^k the mean over problems of their k-th groups.

    Args:
        epochs: groups of a problem before it may be left out (default inferred).
        least: as above (default inferred).

    Raises:
        ValueError: epochs is below 1.
    """

    def __init__(self, epochs: int = 3, least: float = 0.6) -> None:
        if epochs < 1:
            raise ValueError("epochs must be at least 1")
        self._epochs, self._least = epochs, least
        self._history: dict[str, list[float]] = {}  # by problem: mean rewards of its groups

    def gate(self, problem: Candidate) -> bool:
        """Return whether the problem may be chosen; one with fewer groups always may."""
        history = self._history.get(problem.id, [])
        if len(history) < self._epochs:
            return True
        means = [self._mean(k) for k in range(self._epochs)]
        far = sum((1 - mean) ** 2 for mean in means)
        off = sum((r - mean) ** 2 for r, mean in zip(history, means, strict=True))
        return far == 0 or 1 - off / far > self._least

    def observe(self, group: Observed) -> None:
        """Add the mean reward of a group, if it has verdicts and counts still."""
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)]
        history = self._history.setdefault(group.problem.id, [])
        if len(judged) and len(history) < self._epochs:
            history.append(float(judged.mean()))

    def _mean(self, k: int) -> float:
        rewards = [history[k] for history in self._history.values() if len(history) > k]
        return sum(rewards) / len(rewards)

    def state_dict(self) -> dict[str, Any]:
        """Return the history of each problem."""
        return {"history": self._history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history = {problem: list(means) for problem, means in state["history"].items()}


class Ladder:
    """Difficulty ladder (as in Ariadne and MaskSearch): choose problems of at most the present level; the level rises
    by ``rise`` when the mean reward of the newest ``window`` groups of this level is above ``above`` (the rule and the
    defaults are inferred).

    Args:
        column: of the problem's row, with its difficulty, a number.
        start: level at the beginning.
        rise, window, above: see above.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self, column: str = "difficulty", start: float = 1.0, rise: float = 1.0, window: int = 16, above: float = 0.8
    ) -> None:
        if rise <= 0 or window < 1:
            raise ValueError("rise must be positive and window at least 1")
        self._column, self._rise, self._window, self._above = column, rise, window, above
        self._level, self._recent = start, list[float]()

    def order(self, store: Store) -> Iterator[str]:
        """Yield the problems up to the level in their order, then the easiest of the others."""
        problems = list(store.problems.values())
        yield from (p.id for p in problems if self._difficulty(p) <= self._level)
        above = [p for p in problems if self._difficulty(p) > self._level]
        yield from (p.id for p in sorted(above, key=self._difficulty))

    def observe(self, group: Observed) -> None:
        """Count a group of the present level, and raise the level."""
        rewards = group.tree.rewards.get("verifier", group.tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)]
        difficulty = self._difficulty(group.problem)
        if len(judged) and self._level - self._rise < difficulty <= self._level:
            self._recent = [*self._recent, float(judged.mean())][-self._window :]
        if len(self._recent) == self._window and sum(self._recent) / self._window > self._above:
            self._level, self._recent = self._level + self._rise, []

    def _difficulty(self, problem: Candidate) -> float:
        return _number(problem, self._column)

    def state_dict(self) -> dict[str, Any]:
        """Return the level and the newest groups' rewards."""
        return {"level": self._level, "recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._level, self._recent = float(state["level"]), list(state["recent"])


def _number(problem: Candidate, column: str) -> float:
    """Return the number in a problem's row.

    Raises:
        UserError: the row has none there.
    """
    try:
        return float(problem.entry[column])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"The prompt '{problem.id}' has no number in a column '{column}' (data.curriculum_options.column); add it, "
            f"or name one of {', '.join(sorted(problem.entry))}."
        ) from None


CURRICULA: dict[str, Callable[..., Any]] = {
    "ucb": Ucb,
    "difficulty": Difficulty,
    "gvm": Gvm,
    "predicted": Predicted,
    "hard_replay": HardReplay,
    "hardest": Hardest,
    "limr": Limr,
    "ladder": Ladder,
    "posterior": Posterior,
    "greso": Greso,
    "sgpo": Sgpo,
    "knapsack": Knapsack,
}
"""The curricula that `data.curriculum` names."""
