"""The stream of a run's training prompts, with a cursor that a checkpoint stores."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.columns import Array
from ..errors import BadRowError, UserError
from ..parts.context import Context
from ..settings import DataConfig
from ..tasks import GymProblems, Problem
from .curriculum import Curriculum
from .prompts import GIVE_UP, TRAIN, Prompt, make_prompts, question
from .rows import Entries, TrainingRows, rendered
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
        rows: those of `data.path`; None if problems are generated.
        said: number of rows and where they are; empty if problems are generated.
        demonstrated: number of training problems of a file that demonstrations solve; None if they are generated.
        skipped: a sentence about each row that `data.on_bad_row` skipped and that was not told yet.

    Raises:
        UserError: the tasks or the file cannot be used, nor a row of those that are tried, or all rows are held out or
            left out.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        held_out: Sequence[Prompt] = (),
        entries: Entries | None = None,
        context: Context | None = None,
        demonstrations: Collection[str] = (),
    ) -> None:
        self._config = config
        self._left_out = set(demonstrations) if config.disjoint else set()
        self.rows: TrainingRows | None = None
        self.said = ""
        self.demonstrated: int | None = None
        self.skipped: deque[str] = deque()
        self._bad = 0  # rows in a row that were skipped
        context = context or Context(tokenizer)
        self._held_out = held_out
        self._entries = entries
        self._tokenizer = tokenizer
        self._seed = seed
        self._excluded = {prompt.identity for prompt in held_out}
        self._cursor = 0
        self._order: tuple[int, Array] = (-1, np.empty(0, np.int64))  # a pass over the file, and its order
        self._all: list[tuple[int, Problem]] | None = None  # the rows with their numbers, for a curriculum's order
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
            self.rows = TrainingRows(config, tokenizer, held_out, demonstrations, entries)
            self.said, self.demonstrated = self.rows.said, self.rows.demonstrated

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            BadRowError: a row cannot be used, and `data.on_bad_row` does not skip it.
            UserError: every generated problem is held out, or no row can be used.
        """
        if self.curriculum is not None and self.curriculum.orders:
            prompts = self._chosen(count)
        elif self.rows is not None:
            prompts = self._next_rows(self.rows, count)
        else:
            prompts = self._next_problems(count)
        if self.curriculum is not None:
            prompts = self.curriculum.sized(prompts, self._taken)
        return prompts

    def _may_come(self, problem: Problem | Prompt) -> bool:
        """Return whether a problem is neither held out nor left out."""
        return problem.identity not in self._excluded and question(problem) not in self._left_out

    def _next_rows(self, rows: TrainingRows, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        cursor, refused, curriculum = self._cursor, 0, self.curriculum
        while len(prompts) < count:
            if curriculum is None:
                drawn = rows.drawn([self._row(cursor + i) for i in range(count - len(prompts))])
                prompts += self._usable(drawn, len(rows))
                cursor += len(drawn)
                continue
            problem = rows.problem(self._row(cursor))
            cursor += 1
            if isinstance(problem, BadRowError):
                self._usable([problem], len(rows))
            elif curriculum.accepts(problem, self._taken):
                usable = self._usable(rows.prompts([problem]), len(rows))
                prompts += usable
                self._taken.update(prompt.id for prompt in usable)
                refused = 0
            elif (refused := refused + 1) >= len(rows):
                raise self._all_refused()
        self._cursor = cursor
        return prompts

    def _usable(self, drawn: Sequence[Prompt | BadRowError], most: int) -> list[Prompt]:
        """Return the prompts among rows that were drawn.

        Args:
            most: rows in a row that may be skipped.

        Raises:
            BadRowError: there is another row and `data.on_bad_row` does not skip it.
            UserError: only such rows came for long.
        """
        prompts = []
        for one in drawn:
            if isinstance(one, Prompt):
                prompts.append(one)
                self._bad = 0
                continue
            if self._config.on_bad_row == "raise":
                remedy = 'data.on_bad_row = "skip" passes over such rows, also in a resumed run'
                raise BadRowError(f"{str(one).rstrip('.')} ({remedy}).") from one
            self.skipped.append(str(one))
            self._bad += 1
            if self._bad >= most:
                raise UserError(f"The last {most} rows of the data cannot be used, the newest because of this: {one}")
        return prompts

    def _next_problems(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        skipped = 0
        while len(prompts) < count:
            try:
                problem = self._stream[self._cursor]
            except BadRowError as error:
                self._usable([error], GIVE_UP)
                self._cursor += 1
                continue
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
            prompts += self._rendered(problem)
        return prompts

    def _chosen(self, count: int) -> list[Prompt]:
        """Return the prompts that the curriculum's order begins with; it is asked again if its order is too short."""
        assert self.curriculum is not None
        prompts: list[Prompt] = []
        while len(prompts) < count:
            before = len(prompts)
            pool = self._pool(count - before)
            for problem_id in self.curriculum.order(pool.values(), self._taken, [self._seed, self._cursor]):
                problem = pool[problem_id]
                accepted = self.curriculum.accepts(problem, self._taken)
                written = self._rendered(problem) if accepted else []
                if self.rows is not None:
                    self._taken.update(prompt.id for prompt in written)
                else:
                    for waiting in self._waiting:
                        waiting.pop(int(problem_id.rpartition("/")[2]), None)
                prompts += written
                self._cursor += len(written)
                if len(prompts) == count:
                    break
            if len(prompts) == before:
                raise self._all_refused()
        return prompts

    def _rendered(self, problem: Problem) -> list[Prompt]:
        """Return the prompt of a problem; none if `data.on_bad_row` skips it."""
        if self.rows is not None:
            return self._usable(self.rows.prompts([problem]), len(self.rows))
        return self._usable(rendered([problem], self._config, self._tokenizer, self._entries), GIVE_UP)

    def _pool(self, count: int) -> Mapping[str, Problem]:
        """Return the rows, those chosen least often first, or the next ``count`` problems of each task."""
        if self.rows is not None:
            self._all = every = self._all or list(self.rows.problems())
            taken = [self._taken[problem.id] for _, problem in every]
            place = {turn: np.argsort(self._shuffled(turn)).tolist() for turn in set(taken)}
            order = sorted(range(len(taken)), key=lambda i: (taken[i], place[taken[i]][every[i][0]]))
            return {every[i][1].id: every[i][1] for i in order}
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
        skipped = self.skipped.copy(), self._bad
        try:
            return self.next(count)
        finally:
            self._cursor, self._taken, self._numbers, self._waiting = kept
            self.skipped, self._bad = skipped

    def prompt(self, problem: Problem) -> Prompt:
        """Return ``problem`` in the run's template.

        Raises:
            UserError: as `next`.
        """
        (prompt,) = make_prompts([problem], self._config, self._tokenizer)
        return prompt

    @property
    def known(self) -> Sequence[Prompt]:
        """The prompts of a file, each made when it is asked for; empty if problems are generated."""
        return () if self.rows is None else self.rows

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

    def table(self) -> dict[str, Any] | None:
        """Return the curriculum's estimates of success, with the number of all problems as ``of`` (None: no end); None
        without estimates."""
        table = None if self.curriculum is None else self.curriculum.table()
        return None if table is None else table | {"of": None if self.rows is None else len(self.rows)}

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and digests of the files, for an `Archive`."""
        state: dict[str, Any] = {"cursor": self._cursor, "rows": len(self.known), "digests": self._digests}
        state["skipped"] = list(self.skipped)
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
        if state["rows"] != len(self.known):
            raise UserError(
                f"The checkpoint was made with {state['rows']} training rows in {self._config.place} (data.path) and "
                f"there are {len(self.known)} now; restore them or start a run under another --name."
            )
        digests = zip(("training", "held-out"), state["digests"], self._digests, strict=True)
        for what, old, new in reversed(list(digests)):  # a file's own digest is of both
            if old != new:
                place = (what == "held-out" and self._config.eval_place) or self._config.place
                raise UserError(
                    f"The checkpoint was made with other {what} rows, or rows of files with other names, than {place} "
                    "has now, though as many; restore them or start a run under another --name."
                )
        self._cursor = state["cursor"]
        self.skipped = deque(state["skipped"])
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
        held_out = () if self._config.tasks else self._held_out
        return "" if self.rows is None else self.rows.digest(), _digest(held_out)

    def _row(self, cursor: int) -> int:
        """Return the number of the row that comes at a place of the stream."""
        turn, index = divmod(cursor, len(self.known))
        if self._order[0] != turn:
            self._order = (turn, self._shuffled(turn))
        return int(self._order[1][index])

    def _shuffled(self, turn: int) -> Array:  # [rows] int64
        """Return the numbers of the rows in the order of a pass over the file."""
        return np.random.default_rng([self._seed, turn]).permutation(len(self.known))


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        said = repr((prompt.id, prompt.problem, prompt.messages, prompt.n, sorted(prompt.entry.items())))
        said += prompt.identity[len(prompt.problem) :]  # pictures
        digest.update(said.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
