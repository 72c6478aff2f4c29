"""Prompts that are the first observations of text environments with gymnasium's interface."""

from __future__ import annotations

from typing import Any

from ..parts.resolve import import_object


class Games:
    """``data.source = "games"`` yields a row for each seed, for `rollout.program` = "environment" with ``game``.

    Args:
        make: ``file.py:function`` that makes the environment.
        first_seed: the seed of the first row; it increases by 1 with each row.

    Raises:
        UserError: there is no such function.
    """

    def __init__(self, make: str, first_seed: int = 0) -> None:
        self._env, self._seed = import_object(make)(), first_seed

    def next(self, count: int) -> list[dict[str, Any]]:
        rows = []
        for _ in range(count):
            observation, _info = self._env.reset(seed=self._seed)
            rows.append({"prompt": str(observation), "answer": "", "seed": self._seed})
            self._seed += 1
        return rows

    def state_dict(self) -> int:
        """Return the seed of the next row."""
        return self._seed

    def load_state_dict(self, state: int) -> None:
        self._seed = state
