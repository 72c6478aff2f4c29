"""The problems from which a curriculum chooses, with their history, and the groups that it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tree import TokenTree
from ..errors import UserError


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

    def column(self, name: str) -> Any:
        """Return the value of a column; ``a.b`` is the field ``b`` of the column ``a``.

        Raises:
            UserError: the problem has no such column.
        """
        value: Any = self.entry
        for part in (name,) if name in self.entry else name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(f"the curriculum reads the column '{name}', and a problem has {sorted(self.entry)}.")
            value = value[part]
        return value


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
