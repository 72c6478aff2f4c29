"""The stream of a run's training prompts, with a cursor that a checkpoint stores."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..parts.context import Context
from ..settings import DataConfig
from ..tasks import GymProblems, Problem
from .curriculum import Curriculum
from .prompts import GIVE_UP, TRAIN, Prompt, make_prompts, question, read_rows
from .user_source import UserProblems

if TYPE_CHECKING:
    from .group import Group


class PromptSource:
    """Training prompts in an order that follows from ``seed``; a file is shuffled anew for each pass over it.

    A curriculum may pass over prompts or choose their order; then that follows from the groups observed before too.

    Args:
        held_out: prompts whose problems are never returned.
        demonstrations: `question` of the problems that demonstrations solve; `data.disjoint` leaves them out.
        entries: called with a row and its description, returns what checkpoints can store of it; None if they store
            no rows.
        context: the run's values, for what a source or a curriculum asks.

    Attributes:
        demonstrated: number of training problems of a file that demonstrations solve; None if they are generated.
        said: number of rows and where they are; empty if problems are generated.

    Raises:
        UserError: the tasks or the file cannot be used, a row is too long, or all rows are held out or left out.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        held_out: Sequence[Prompt] = (),
        entries: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None,
        context: Context | None = None,
        demonstrations: Collection[str] = (),
    ) -> None:
        self._config = config
        self._left_out = set(demonstrations) if config.disjoint else set()
        self.demonstrated: int | None = None
        self.said = ""
        context = context or Context(tokenizer)
        self._held_out = held_out
        self._entries = entries
        self._tokenizer = tokenizer
        self._seed = seed
        self._excluded = {prompt.identity for prompt in held_out}
        self._cursor = 0
        self._order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order
        self._rows: list[Prompt] = []
        self._stream: Any = None
        self.curriculum = None if config.curriculum is None else Curriculum(config, context)
        self._taken: Counter[str] = Counter()  # rows chosen so far, by id; kept for a curriculum
        self._numbers = [0] * len(config.tasks)  # of the problems that a curriculum chooses from: the next of each task
        self._waiting: list[dict[int, Problem]] = [{} for _ in config.tasks]  # those before it that were not chosen
        if config.source is not None:
            self._stream = UserProblems(config, context)
        elif config.tasks:
            self._stream = GymProblems(config.tasks, [TRAIN, seed])
        elif config.place is not None:
            problems = read_rows(config, config.place)
            self.said = problems.said
            # all rows are checked now, so that one that is too long does not end a run after hours
            prompts = make_prompts(problems.rows, config, tokenizer)
            prompts = [prompt for prompt in prompts if prompt.identity not in self._excluded]
            self.demonstrated = sum(question(prompt) in demonstrations for prompt in prompts)
            self._rows = self._fit([prompt for prompt in prompts if self._may_come(prompt)])
            if not self._rows:
                why = " or have a prompt of demonstrations (data.disjoint)" if config.disjoint else ""
                raise UserError(
                    f"All problems of {config.place} (data.path) are held out{why}; lower evaluation.problems or add "
                    "rows."
                )

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            UserError: a prompt is longer than `data.max_prompt_tokens`, or every generated problem is held out.
        """
        if self.curriculum is not None and self.curriculum.orders:
            prompts = self._chosen(count)
        elif self._rows:
            prompts = self._next_rows(count)
        else:
            prompts = self._next_problems(count)
        if self.curriculum is not None:
            prompts = [self.curriculum.sized(prompt, self._taken) for prompt in prompts]
        return prompts

    def _may_come(self, problem: Problem | Prompt) -> bool:
        """Return whether a problem is neither held out nor left out."""
        return problem.identity not in self._excluded and question(problem) not in self._left_out

    def _next_rows(self, count: int) -> list[Prompt]:
        if self.curriculum is None:
            self._cursor += count
            return [self._row(turn) for turn in range(self._cursor - count, self._cursor)]
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count:
            prompt = self._row(self._cursor)
            self._cursor += 1
            if self.curriculum.accepts(prompt, self._taken):
                prompts.append(prompt)
                self._taken[prompt.id] += 1
                refused = 0
            elif (refused := refused + 1) >= len(self._rows):
                raise self._all_refused()
        return prompts

    def _next_problems(self, count: int) -> list[Prompt]:
        problems: list[Problem] = []
        skipped = 0
        while len(problems) < count:
            problem = self._stream[self._cursor]
            self._cursor += 1
            if not self._may_come(problem):
                skipped += 1
                if skipped > GIVE_UP:
                    what = "source" if self._config.source is not None else "tasks"
                    why = " or prompts of demonstrations (data.disjoint)" if self._config.disjoint else ""
                    raise UserError(
                        f"data.{what} generates no problems that are not held out{why}; make them harder or lower "
                        "evaluation.problems."
                    )
                continue
            if self.curriculum is not None and not self.curriculum.accepts(problem, self._taken):
                if (skipped := skipped + 1) > GIVE_UP:
                    raise self._all_refused()
                continue
            skipped = 0
            problems.append(problem)
        return self._fit(make_prompts(problems, self._config, self._tokenizer))

    def _chosen(self, count: int) -> list[Prompt]:
        """Return the prompts that the curriculum's order begins with; it is asked again if its order is too short."""
        assert self.curriculum is not None
        prompts: list[Prompt] = []
        while len(prompts) < count:
            before = len(prompts)
            pool = self._pool(count - before)
            for found in self.curriculum.order(pool.values(), self._taken, [self._seed, self._cursor]):
                problem = pool[found]
                accepted = self.curriculum.accepts(problem, self._taken)
                if isinstance(problem, Prompt):
                    self._taken[found] += accepted
                    prompts += [problem] * accepted
                else:
                    for waiting in self._waiting:
                        waiting.pop(int(found.rpartition("/")[2]), None)
                    prompts += self._fit(make_prompts([problem] * accepted, self._config, self._tokenizer))
                self._cursor += accepted
                if len(prompts) == count:
                    break
            if len(prompts) == before:
                raise self._all_refused()
        return prompts

    def _pool(self, count: int) -> Mapping[str, Prompt | Problem]:
        """Return the rows, those chosen least often first, or the next ``count`` problems of each task."""
        if self._rows:
            taken = [self._taken[row.id] for row in self._rows]
            place = {turn: np.argsort(self._shuffled(turn)).tolist() for turn in set(taken)}
            order = sorted(range(len(taken)), key=lambda i: (taken[i], place[taken[i]][i]))
            return {self._rows[i].id: self._rows[i] for i in order}
        for index, waiting in enumerate(self._waiting):
            for _ in range(GIVE_UP):
                if len(waiting) >= count:
                    break
                # a number belongs to one task, as two tasks may have one name and ids have both
                number = self._numbers[index] * len(self._waiting) + index
                self._numbers[index] += 1
                problem = self._stream.of_task(index, number)
                if self._may_come(problem):
                    waiting[number] = problem
        first = [list(waiting.values())[:count] for waiting in self._waiting]
        return {problem.id: problem for problems in first for problem in problems}

    def _all_refused(self) -> UserError:
        assert self.curriculum is not None
        return UserError(f"{self.curriculum.what} chooses no prompt any more; widen its options or add problems.")

    def peek(self, count: int) -> list[Prompt]:
        """Return the prompts that `next` will return, without advancing the cursor."""
        kept = self._cursor, self._taken.copy(), list(self._numbers), [dict(waiting) for waiting in self._waiting]
        try:
            return self.next(count)
        finally:
            self._cursor, self._taken, self._numbers, self._waiting = kept

    def prompt(self, problem: Problem) -> Prompt:
        """Return ``problem`` in the run's template.

        Raises:
            UserError: as `next`.
        """
        (prompt,) = make_prompts([problem], self._config, self._tokenizer)
        return prompt

    @property
    def known(self) -> Sequence[Prompt]:
        """The prompts of a file; empty if problems are generated."""
        return self._rows

    @property
    def observes(self) -> bool:
        """True if `observe` has an effect."""
        return self.curriculum is not None or (isinstance(self._stream, UserProblems) and self._stream.observes)

    def observe(self, groups: Sequence[Group]) -> None:
        """Pass the groups of an ended step to the curriculum or the user's source, if it has a method ``observe``."""
        if self.curriculum is not None:
            for group in groups:
                self.curriculum.observe(group, self._taken)
        if isinstance(self._stream, UserProblems):
            self._stream.observe([group.tree for group in groups])

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and digests of the files, for an `Archive`."""
        state: dict[str, Any] = {"cursor": self._cursor, "rows": len(self._rows), "digests": self._digests}
        if isinstance(self._stream, UserProblems):
            state["source"] = self._stream.state_dict(self._cursor)
        if self.curriculum is not None:
            state |= {"taken": self._taken, "numbers": self._numbers, "waiting": [list(w) for w in self._waiting]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved stream.

        Raises:
            UserError: the file has other rows now.
        """
        if state["rows"] != len(self._rows):
            raise UserError(
                f"The checkpoint was made with {state['rows']} training rows in {self._config.place} (data.path) and "
                f"there are {len(self._rows)} now; restore them or start a run under another --name."
            )
        for what, old, new in zip(("training", "held-out"), state["digests"], self._digests, strict=True):
            if old != new:
                place = (what == "held-out" and self._config.eval_place) or self._config.place
                raise UserError(
                    f"The checkpoint was made with other {what} rows, or rows of files with other names, than {place} "
                    "has now, though as many; restore them or start a run under another --name."
                )
        self._cursor = state["cursor"]
        if self.curriculum is not None:
            self._taken, self._numbers = state["taken"], state["numbers"]
            self._waiting = [
                {number: self._stream.of_task(index, number) for number in numbers}
                for index, numbers in enumerate(state["waiting"])
            ]
        if isinstance(self._stream, UserProblems):
            self._stream.load_state_dict(state["source"])

    @cached_property
    def _digests(self) -> tuple[str, str]:
        """Digests of the training and held-out rows; generated problems follow from the configuration."""
        return _digest(self._rows), _digest(() if self._config.tasks else self._held_out)

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts with entries that checkpoints can store."""
        if self._entries is None:
            return prompts
        return [replace(p, entry=self._entries(p.entry, f"The prompt '{p.id}'")) for p in prompts]

    def _row(self, cursor: int) -> Prompt:
        turn, index = divmod(cursor, len(self._rows))
        if self._order[0] != turn:
            self._order = (turn, self._shuffled(turn))
        return self._rows[self._order[1][index]]

    def _shuffled(self, turn: int) -> list[int]:
        """Return the indices of the rows in the order of a pass over the file."""
        order: list[int] = np.random.default_rng([self._seed, turn]).permutation(len(self._rows)).tolist()
        return order


def _digest(prompts: Sequence[Prompt]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        said = repr((prompt.id, prompt.problem, prompt.messages, prompt.n, sorted(prompt.entry.items())))
        said += prompt.identity[len(prompt.problem) :]  # pictures
        found.update(said.encode("utf-8", "surrogatepass"))
    return found.hexdigest()
