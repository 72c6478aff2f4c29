"""Checks before a run that responses to its problems can be judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UserError
from ..settings import RewardConfig
from .interface import Rewards
from .references import reference_text

NEED_TEXT = {"math", "exact", "regex"}
"""Verifiers that compare with a reference answer as a text."""


def check_references(rewards: Rewards, config: RewardConfig, problems: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Let the verifier read each problem once; return a sentence about those that it cannot read, or nothing.

    Args:
        problems: the id and the entry of each (`Prompt.id`, `Prompt.entry`).

    Raises:
        UserError: a reference answer is missing or has no text, or a larger share than `reward.max_unreadable` cannot
            be read.
    """
    entries = dict(problems)
    if config.verifier in NEED_TEXT:
        for problem, entry in entries.items():
            try:
                reference_text(entry.get("answer"))
            except ValueError as error:
                raise UserError(
                    f"The row of '{problem}' cannot be judged by reward.verifier = '{config.verifier}': {error}; "
                    "mend the row, or name another column (data.answer_key)."
                ) from None
    found = zip(entries, rewards.check(list(entries.values())), strict=True)
    unread = [(problem, why) for problem, why in found if why is not None]
    if not unread:
        return ""
    problem, why = unread[0]
    share = len(unread) / len(entries)
    what = f"{len(unread)} of {len(entries)} problems cannot be judged, such as '{problem}': {why.rstrip('.')}"
    if share > config.max_unreadable:
        raise UserError(
            f"{what}; mend these rows, name another column (data.answer_key), or raise reward.max_unreadable = "
            f"{config.max_unreadable:g}."
        )
    return f"{what}. Responses to these are counted as failed (reward.on_failure = '{config.on_failure}')"
