"""Tries rows of `data.path` before a run, and each one when it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ...errors import UserError
from ...prompts.prompts import Prompt
from ...prompts.sources import PromptSource
from ...rewards.check import text_check
from ...settings import TrainConfig

Entry = tuple[str, dict[str, Any]]
"""The id of a problem and its row."""


def check_answers(config: TrainConfig, source: PromptSource) -> None:
    """Let the rows that are tried and those that are drawn have a reference answer that the verifiers can read.

    Raises:
        UserError: one has none.
    """
    if source.rows is not None:
        has_text = text_check(config.reward)
        source.rows.check_each(lambda prompt: has_text(prompt.id, prompt.entry))


def known_entries(
    source: PromptSource, problems: Sequence[Prompt], *, every: bool
) -> tuple[Iterable[Entry], Iterable[Mapping[str, Any]]]:
    """Return the ids and rows that the verifiers read before a run, and those of the rest of `data.path`.

    Args:
        problems: those held out.
        every: all rows are read, not only those that are tried.
    """
    held_out = [(prompt.id, prompt.entry) for prompt in problems]
    if source.rows is None:
        return held_out, ()
    rows = ((problem.id, problem.entry) for _, problem in source.rows.problems())
    if every:
        return chain(rows, held_out), ()
    tried = [(prompt.id, prompt.entry) for prompt in source.rows.tried]
    return [*tried, *held_out], (entry for _, entry in rows)


def check_rows(source: PromptSource, note: Callable[[str], object], *, every: bool) -> Iterator[str]:
    """Yield a sentence about the rows of `data.path` that cannot be used, if there are such, and with ``every`` one
    about all rows; ``note`` is called with a sentence about each of the first.

    Raises:
        UserError: there are such rows and `data.on_bad_row` does not skip them, or there is nothing to try.
    """
    if every and source.rows is None:
        raise UserError("--check-data tries the rows of data.path, and the run has none; leave it out.")
    if source.rows is None:
        return
    if every:
        yield source.rows.check_all(note)
    elif bad := source.rows.bad:
        tried = len(bad) + len(source.rows.tried)
        what = f"{len(bad)} of {tried} rows that were tried cannot be used and are skipped (data.on_bad_row)"
        yield f"{what}, the first because of this: {bad[0]}"
