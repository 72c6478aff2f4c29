"""The rows of `data.path` that a run trains on: each stays on disk until it is drawn, and becomes a prompt then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeGuard, TypeVar, overload

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import BadRowError, UserError
from ..settings import DataConfig
from ..tasks import Problem
from ..tasks.problems import spread
from .prompts import Prompt, make_prompts, question, read_rows

T = TypeVar("T", Prompt, Problem)
Entries = Callable[[Mapping[str, Any], str], dict[str, Any]]
"""Returns what checkpoints can store of a row, from it and its description."""
TOGETHER = 256
"""Rows that are made into prompts together where all are."""
NAMED = 20
"""Rows that are named where all that cannot be used are counted."""


def rendered(
    problems: Sequence[Problem],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    entries: Entries | None,
) -> list[Prompt | BadRowError]:
    """Return the prompts of problems, with entries that checkpoints can store; an error in place of one that cannot be
    made."""
    try:
        prompts = make_prompts(problems, config, tokenizer)
        if entries is None:
            return list(prompts)
        return [replace(prompt, entry=entries(prompt.entry, f"The prompt '{prompt.id}'")) for prompt in prompts]
    except UserError as error:
        if len(problems) == 1:
            return [BadRowError(str(error))]
    return [one for problem in problems for one in rendered([problem], config, tokenizer, entries)]


class TrainingRows(Sequence[Prompt]):
    """The rows to train on, in the order of the files, as prompts; rows that are held out or left out are none of them.

    What has to be compared with all rows (held-out problems, prompts of demonstrations) is, in one pass that keeps none
    and makes no prompt. A sample of the rows is tried at once.

    Args:
        held_out: prompts of problems that are left out.
        demonstrations: `question` of the problems that demonstrations solve; `data.disjoint` leaves them out.

    Attributes:
        said: number of rows and where they are.
        demonstrated: number of rows, those held out aside, that demonstrations solve.
        tried: the prompts of the sample.
        bad: a sentence about each row of the sample that is no prompt; empty where such rows are refused.

    Raises:
        UserError: the place cannot be used, or all rows are held out or left out.
        BadRowError: a row of the sample is no prompt and `data.on_bad_row` does not skip it.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        held_out: Sequence[Prompt],
        demonstrations: Collection[str],
        entries: Entries | None,
    ) -> None:
        self._config, self._tokenizer, self._entries = config, tokenizer, entries
        assert config.place is not None
        rows = read_rows(config, config.place)
        self._problems, self.said = rows.rows, rows.said
        self._checks: list[Callable[[Prompt], object]] = []
        self._out, self.demonstrated = self._compared(held_out, demonstrations)
        if not len(self):
            why = " or have a prompt of demonstrations (data.disjoint)" if config.disjoint else ""
            raise UserError(
                f"All problems of {config.place} (data.path) are held out{why}; lower evaluation.problems or add rows."
            )
        self.tried: list[Prompt] = []
        self.bad: list[str] = []
        self._keep(self.drawn(spread(len(self))))

    def __len__(self) -> int:
        return len(self._problems) - len(self._out)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, number: int | slice) -> Prompt | Sequence[Prompt]:
        numbers = range(len(self))[number]
        drawn = self.drawn([numbers] if isinstance(numbers, int) else numbers)
        prompts = [prompt for prompt in drawn if _usable(prompt, skips=False)]
        return prompts[0] if isinstance(number, int) else prompts

    def __iter__(self) -> Iterator[Prompt]:
        """Yield all prompts; rows that are none are passed over if `data.on_bad_row` skips them, else refused."""
        yield from (prompt for prompt in self.every() if _usable(prompt, skips=self._skips))

    def every(self) -> Iterator[Prompt | BadRowError]:
        """Yield all rows as prompts, an error in place of one that is none."""
        rows = self._scan()
        while chunk := list(islice(rows, TOGETHER)):
            yield from self.prompts(chunk)

    def problems(self) -> Iterator[tuple[int, Problem]]:
        """Yield all rows before they are made into prompts, with their numbers; those that are none as `__iter__`."""
        for number, row in enumerate(self._scan()):
            if _usable(kept := self._kept(row), skips=self._skips):
                yield number, kept

    def drawn(self, numbers: Sequence[int]) -> list[Prompt | BadRowError]:
        """Return the prompts of some rows; an error in place of a row that is none, or that a check refuses."""
        return self.prompts([self._problem(number) for number in numbers])

    def prompts(self, rows: Sequence[Problem | BadRowError]) -> list[Prompt | BadRowError]:
        """Return the prompts of problems; an error in place of one that cannot be made, or that a check refuses."""
        problems = [each for each in rows if isinstance(each, Problem)]
        prompts = iter(rendered(problems, self._config, self._tokenizer, self._entries) if problems else [])
        return [self._checked(next(prompts)) if isinstance(each, Problem) else each for each in rows]

    def problem(self, number: int) -> Problem | BadRowError:
        """Return a row before it is made into a prompt, with an entry that checkpoints can store."""
        return self._kept(self._problem(number))

    def _kept(self, row: Problem | BadRowError) -> Problem | BadRowError:
        if self._entries is None or isinstance(row, BadRowError):
            return row
        try:
            return replace(row, entry=self._entries(row.entry, f"The prompt '{row.id}'"))
        except UserError as error:
            return BadRowError(str(error))

    def check_each(self, check: Callable[[Prompt], object]) -> None:
        """Let ``check``, which raises UserError for what the run cannot use, see the sample and each drawn row.

        Raises:
            BadRowError: as at the start.
        """
        self._checks.append(check)
        tried, self.tried = self.tried, []
        self._keep([self._checked(prompt) for prompt in tried])

    def check_all(self, note: Callable[[str], object]) -> str:
        """Try every row; return a sentence about how many can be used.

        Args:
            note: called with a sentence about each of the first rows that cannot.

        Raises:
            UserError: there are such rows and `data.on_bad_row` does not skip them.
        """
        bad, first = 0, ""
        for one in self.every():
            if isinstance(one, BadRowError):
                first = first or str(one)
                bad += 1
                if bad <= NAMED:
                    note(str(one))
        if not bad:
            return f"all {len(self)} rows of {self._config.place} (data.path) to train on can be used"
        what = f"{bad} of {len(self)} rows of {self._config.place} (data.path) to train on cannot be used"
        if not self._skips:
            raise UserError(f"{what}, the first because of this: {first}")
        return f"{what}; they are skipped (data.on_bad_row)"

    def digest(self) -> str:
        """Return a hash of the rows and of those that are left out."""
        pictures = self._config.image_key is not None or any(prompt.images for prompt in self.tried)
        digest = hashlib.blake2b(self._problems.digest(pictures=pictures), digest_size=16)
        digest.update(self._out.tobytes())
        return digest.hexdigest()

    @property
    def _skips(self) -> bool:
        return self._config.on_bad_row == "skip"

    def _problem(self, number: int) -> Problem | BadRowError:
        # the row before which as many are left out as at it: `number` counts the others
        place = number + int(np.searchsorted(self._out - np.arange(len(self._out)), number, "right"))
        try:
            return self._problems[place]
        except BadRowError as error:
            return error

    def _scan(self) -> Iterator[Problem | BadRowError]:
        """Yield all rows in order, read block by block."""
        out = iter([*self._out.tolist(), -1])
        left_out = next(out)
        for place, (number, table, row) in enumerate(self._problems.rows()):
            if place == left_out:
                left_out = next(out)
                continue
            try:
                yield self._problems.made(number, table, row)
            except BadRowError as error:
                yield error

    def _checked(self, prompt: Prompt | BadRowError) -> Prompt | BadRowError:
        if isinstance(prompt, BadRowError):
            return prompt
        try:
            for check in self._checks:
                check(prompt)
        except UserError as error:
            return BadRowError(str(error))
        return prompt

    def _keep(self, rows: Sequence[Prompt | BadRowError]) -> None:
        """Enter rows of the sample."""
        for one in rows:
            if _usable(one, skips=self._skips):
                self.tried.append(one)
            else:
                self.bad.append(str(one))
        if not self.tried:
            raise UserError(f"None of the rows of {self._config.place} that were tried can be used: {self.bad[0]}")

    def _compared(self, held_out: Sequence[Prompt], demonstrations: Collection[str]) -> tuple[Any, int]:
        """Return the numbers of the rows that are not trained on, in order, and how many demonstrations solve."""
        if not held_out and not demonstrations:
            return np.empty(0, np.int64), 0
        texts, identities = {prompt.problem for prompt in held_out}, {prompt.identity for prompt in held_out}
        out, demonstrated = list[int](), 0
        key, shown = self._config.prompt_key, self._config.image_key is not None
        for place, (number, table, row) in enumerate(self._problems.rows()):
            text = None if isinstance(row, BadRowError) or shown else row.get(key)
            if isinstance(text, str):  # its own identity and question, as it shows no pictures
                held, solved = text in identities, bool(demonstrations) and text.strip() in demonstrations
            else:
                try:
                    problem = self._problems.made(number, table, row)
                    held = problem.text in texts and problem.identity in identities
                    solved = bool(demonstrations) and question(problem) in demonstrations
                except BadRowError:
                    if not self._skips:
                        raise
                    continue
            demonstrated += solved and not held
            if held or (solved and self._config.disjoint):
                out.append(place)
        return np.array(out, np.int64), demonstrated


def _usable(row: T | BadRowError, *, skips: bool) -> TypeGuard[T]:
    """Return whether it is not the error of a row; raise this unless it ``skips`` such rows."""
    if isinstance(row, BadRowError) and not skips:
        raise row
    return not isinstance(row, BadRowError)
