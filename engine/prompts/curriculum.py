"""Calls the curriculum of a run, and keeps the history of its prompts by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.episodes import Episodes
from ..errors import UserError
from ..methods.candidates import Candidate, Observed, Store
from ..methods.curricula import CURRICULA
from ..methods.shaping import GIVEN
from ..parts.calling import call
from ..parts.context import Context
from ..parts.resolve import resolve
from ..settings import DataConfig
from ..tasks import Problem
from .prompts import Prompt

if TYPE_CHECKING:
    from .group import Group


class Curriculum:
    """The class that `data.curriculum` names, with what is known of each prompt; part of checkpoints.

    Prompts of `data.tasks` come once, so nothing is kept of each.

    Args:
        context: the run's values, for what the class's methods ask.

    Raises:
        UserError: there is no such class, or it decides nothing.
    """

    def __init__(self, config: DataConfig, context: Context | None = None) -> None:
        self._context = context or Context()
        assert config.curriculum is not None
        self.what = f"data.curriculum = '{config.curriculum}'"
        self._part = resolve("data.curriculum", config.curriculum, config.curriculum_options, parts=CURRICULA)
        self._keeps = config.path is not None
        self._observed: dict[str, list[float]] = {}  # number of judged responses and sum of their rewards, by prompt id
        if not any(self._method(name) for name in ("order", "gate", "wanted", "spread")):
            raise UserError(
                f"{self.what} must be a class with a method order(store), gate(problem), wanted(problem) or "
                "spread(problems)."
            )

    @property
    def orders(self) -> bool:
        """True if the class has a method ``order``."""
        return self._method("order") is not None

    def order(self, problems: Iterable[Prompt | Problem], taken: Mapping[str, int], seed: list[int]) -> Iterator[str]:
        """Yield ids of ``problems``, the most wanted first.

        Args:
            taken: number of times that each problem was chosen.
            seed: seed of the random numbers that the class may use.

        Raises:
            UserError: the class failed, or named no problem.
        """
        left = {problem.id: self._candidate(problem, taken) for problem in problems}
        store = Store(dict(left), np.random.default_rng(seed))  # which the class may iterate over while it yields
        answer = call(self.what, iter, self._context.call(self.what, self._part.order, store))
        while (chosen := call(self.what, next, answer, None)) is not None:
            if not isinstance(chosen, str) or left.pop(chosen, None) is None:
                raise UserError(
                    f"{self.what}: order(store) named {chosen!r}, which is not the id of a problem in the store or was "
                    "named before."
                )
            yield chosen

    def accepts(self, problem: Prompt | Problem, taken: Mapping[str, int]) -> bool:
        """Return whether the problem may be sampled."""
        gate = self._method("gate")
        return gate is None or bool(self._context.call(self.what, gate, self._candidate(problem, taken)))

    def sized(self, prompts: Sequence[Prompt], taken: Mapping[str, int]) -> list[Prompt]:
        """Return prompts that were chosen together with the numbers of responses that the class wants.

        Raises:
            UserError: it wants no positive integers.
        """
        candidates = [self._candidate(prompt, taken) for prompt in prompts]
        if (spread := self._method("spread")) is not None and prompts:
            sizes = self._context.call(self.what, spread, candidates)
            if not isinstance(sizes, list) or len(sizes) != len(prompts) or None in sizes:
                raise UserError(
                    f"{self.what}: spread(problems) answered {sizes!r:.80} for {len(prompts)} problems; give a list "
                    "with an integer of at least 1 for each."
                )
        elif (wanted_count := self._method("wanted")) is not None:
            sizes = [self._context.call(self.what, wanted_count, candidate) for candidate in candidates]
        else:
            return list(prompts)
        return [self._of_size(prompt, n) for prompt, n in zip(prompts, sizes, strict=True)]

    def _of_size(self, prompt: Prompt, n: Any) -> Prompt:
        if n is None:
            return prompt
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 2**31:
            method = "wanted(problem)" if self._method("spread") is None else "spread(problems)"
            raise UserError(f"{self.what}: {method} answered {n!r}; give an integer of at least 1, or None.")
        return replace(prompt, n=n)

    def observe(self, group: Group, taken: Mapping[str, int]) -> None:
        """Enter the rewards of a group into the history, then show it to the class."""
        tree = Episodes(group.tree).tree
        rewards = tree.rewards.get(GIVEN, tree.rewards["reward"])
        judged = rewards[~np.isnan(rewards)].astype(np.float64)
        if self._keeps and len(judged):
            count, total = self._observed.get(group.prompt.id, (0, 0.0))
            self._observed[group.prompt.id] = [count + len(judged), total + float(judged.sum())]
        if (observe := self._method("observe")) is not None:
            candidate = self._candidate(group.prompt, taken)
            self._context.call(self.what, observe, Observed(candidate, tree, group.reason or None))

    def table(self) -> dict[str, Any] | None:
        """Return the class's estimates of success for the report, see `SuccessRates.table`; None if it makes none."""
        table = self._method("success_table")
        return None if table is None else call(self.what, table)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, and the state of the class if it has any."""
        class_state = self._method("state_dict")
        return {"observed": self._observed, "own": None if class_state is None else class_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._observed = dict(state["observed"])
        if (load := self._method("load_state_dict")) is not None:
            load(state["own"])

    def _candidate(self, problem: Prompt | Problem, taken: Mapping[str, int]) -> Candidate:
        count, total = self._observed.get(problem.id, (0, 0.0))
        mean = total / count if count else None
        text = problem.problem if isinstance(problem, Prompt) else problem.text
        return Candidate(problem.id, problem.task, text, problem.entry, taken.get(problem.id, 0), int(count), mean)

    def _method(self, name: str) -> Callable[..., Any] | None:
        method = getattr(self._part, name, None)
        return method if callable(method) else None
