"""Curricula choose the prompts of a run by what is known of the earlier ones.

A curriculum is a class with at least one of these methods:

- ``order(store)`` returns or yields ids of ``store.problems``, the most wanted first; it may be called to look ahead,
  so it changes nothing. With `data.path` the store has every problem, with `data.tasks` the next unused ones of each
  task. Without it, prompts come in the order that they have without a curriculum.
- ``gate(problem)`` returns False to pass over a `Candidate`.
- ``wanted(problem)`` returns the number of responses to sample for a `Candidate`; None: as without a curriculum.

``observe(group)`` is optional and is called after each step for every group that was trained or dropped, see
`Observed`. ``state_dict()`` and ``load_state_dict(state)`` are optional and exchange plain values with a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tree import TokenTree
from ..errors import UserError

FINER = ("node_advantage", "token_advantage", "path_advantage")
"""Columns of credit that replace the credit of whole responses."""


@dataclass(frozen=True)
class Candidate:
    """A problem that may be chosen, with its history in the run."""

    id: str
    task: str
    text: str
    """The problem before `data.template`."""
    entry: Mapping[str, Any]
    """Columns of the problem's row."""
    taken: int
    """Number of times that it was chosen; always 0 with `data.tasks`, whose problems come once."""
    responses: int
    """Number of its responses that were judged and observed."""
    mean_reward: float | None
    """Mean of their rewards before shaping, which is the success rate for rewards of 0 and 1; None without any."""


@dataclass(frozen=True)
class Store:
    """The problems to choose from."""

    problems: Mapping[str, Candidate]
    """Problems by id; those chosen least often first, then in the shuffled order of the run."""
    rng: np.random.Generator
    """Follows from the run's seed and the number of prompts that were chosen before."""


@dataclass(frozen=True)
class Observed:
    """A group after its step."""

    problem: Candidate
    tree: TokenTree
    """Its responses with rewards and credit."""
    dropped: str | None
    """Reason for which it was dropped after judging; None if it was trained."""


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
