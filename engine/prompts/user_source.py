"""Problems of a class that the configuration names: `data.source`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.tree import TokenTree
from ..errors import BadRowError, UserError
from ..parts.calling import call
from ..parts.context import ALWAYS, OF_TREES, SAMPLING, Context
from ..parts.resolve import resolve
from ..settings import DataConfig
from ..tasks import Games, Problem, problem_of
from ..tasks.openenv import ServedPrompts
from ..tasks.verifiers import TasksetPrompts

SOURCES = {"games": Games, "verifiers": TasksetPrompts, "openenv": ServedPrompts}
"""Classes that `data.source` may name."""


class UserProblems:
    """Problems of the class that `data.source` names, by their number; each is requested once, in order.

    ``next(count)`` returns that many rows with the columns `data.prompt_key` and `data.answer_key`. ``observe(trees)``
    is optional and gets the groups of each ended step with their credit: those that were trained on, and those that
    were dropped after judging, whose ``meta["dropped"]`` is the reason. ``state_dict()`` and ``load_state_dict(state)``
    are optional and exchange plain values with a checkpoint; without them, a resumed run calls ``next`` for the rows
    that were used before.

    Raises:
        UserError: the class does not exist, or one of its methods raises or returns something else.
    """

    def __init__(self, config: DataConfig, context: Context) -> None:
        self._context = context
        assert config.source is not None
        self._what = f"data.source = '{config.source}'"
        self._config = config
        self._source = resolve("data.source", config.source, config.source_options, parts=SOURCES)
        if not callable(getattr(self._source, "next", None)):
            raise UserError(f"{self._what} must be a class with a method next(count).")
        self._ready: dict[int, dict[str, Any]] = {}  # rows by number, also those requested ahead
        self._requested = 0
        self._from = 0  # first row that a checkpoint may need

    def __getitem__(self, number: int) -> Problem:
        while self._requested <= number:
            rows = self._context.call(self._what, self._source.next, 1, offers=(*ALWAYS, *SAMPLING))
            if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
                raise UserError(f"{self._what}: next(1) must answer a list of one row, a dict.")
            self._ready[self._requested] = rows[0]
            self._requested += 1
        keys = self._config.prompt_key, self._config.answer_key, self._config.image_key
        try:
            return problem_of(self._ready[number], self._what, "source", number, *keys)
        except UserError as error:
            raise BadRowError(str(error)) from error

    @property
    def observes(self) -> bool:
        return hasattr(self._source, "observe")

    def observe(self, trees: Sequence[TokenTree]) -> None:
        """Pass trees to the class, if it has a method ``observe``."""
        if self.observes:
            self._context.call(self._what, self._source.observe, trees, offers=OF_TREES)

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """Return the state to continue from problem ``cursor``; earlier rows are dropped."""
        self._ready = {number: row for number, row in self._ready.items() if number >= self._from}
        self._from = cursor  # dropped at the next call: the checkpoint that this is for may fail
        ready = [[number, row] for number, row in self._ready.items() if number >= cursor]
        source_state = call(self._what, self._source.state_dict) if hasattr(self._source, "state_dict") else None
        return {"own": source_state, "asked": self._requested, "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; without a state of its own the class gives the rows after it only once,
        so a run that goes back in place keeps those that it has."""
        requested, ready = state["asked"], dict(map(tuple, state["ready"]))
        if hasattr(self._source, "load_state_dict"):
            call(self._what, self._source.load_state_dict, state["own"])
        elif self._requested < requested:
            self._context.call(self._what, self._source.next, requested - self._requested, offers=(*ALWAYS, *SAMPLING))
        elif self._requested > requested:
            requested, ready = self._requested, ready | self._ready
        self._requested, self._ready, self._from = requested, ready, 0
