"""Columns of the policy's own statistics that a part reads, named in its attribute ``reads``::

    def surprising(tree):  # a selection
        return tree.policy_entropy > 1

    surprising.reads = ("policy_entropy",)

The policy computes them in one pass before the step's updates, at the temperature of training, for every response
token, given ones too; on demonstrations those that loss terms read. They are in place when rewards are shaped, and on
demonstrations when terms select. ``policy_kl`` needs a reference, and costs a pass of the policy and one of that.
``policy_logprob/NAME`` is the log-prob of the ids in the token column ``NAME`` (-1: none), which the part's method
``prepare(trees)`` sets before that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from ..parts.resolve import import_object
from .columns import Column, declare, find_column

STATISTIC = {
    "policy_logprob": "logprob",
    "policy_entropy": "entropy",
    "policy_sum_p2": "sum_p2",
    "policy_mean_logprob": "mean_logprob",
}
"""Statistics of the head by the column that holds them."""
OF_IDS = "policy_logprob/"
"""Begins the column of the log-probs of other ids than the tokens' own."""
DIVERGENCE = "policy_kl"
"""The column of the policy's divergence from the reference."""
_MEANING = {
    "policy_logprob": "log-probability under the policy before the step's updates",
    "policy_entropy": "entropy of the policy's distribution before the step's updates",
    "policy_sum_p2": "sum over the vocabulary of the policy's squared probabilities before the step's updates",
    "policy_mean_logprob": "mean over the vocabulary of the policy's log-probabilities before the step's updates",
    DIVERGENCE: "KL divergence of the policy's distribution before the step's updates from the reference's",
}
for _name, _meaning in _MEANING.items():
    declare(Column(_name, np.float32, "token", _meaning, fill=np.nan, merge="first", to_device=True))

Part = TypeVar("Part", bound=Callable[..., Any])


def reads(*columns: str) -> Callable[[Part], Part]:
    """Return a decorator that names the columns of statistics which a function reads."""

    def mark(part: Part) -> Part:
        part.reads = columns  # type: ignore[attr-defined]
        return part

    return mark


def columns_read(key: str, name: str | None, parts: Mapping[str, Callable[..., Any]]) -> tuple[str, ...]:
    """Return the columns of statistics that the part called ``name`` reads.

    Raises:
        UserError: it names another column, or ids that are no token column.
    """
    part = None if name is None else parts[name] if name in parts else import_object(name) if ":" in name else None
    columns = tuple(getattr(part, "reads", ()))
    for column in columns:
        if not isinstance(column, str) or (column not in _MEANING and not column.startswith(OF_IDS)):
            raise UserError(
                f"{key} = '{name}' reads {column!r}, which the policy does not compute; `reads` may name "
                f"{', '.join(_MEANING)}, or {OF_IDS}NAME for the ids in a column NAME."
            )
        if column.startswith(OF_IDS):
            of_ids(f"{key} = '{name}'", column)
    return columns


def of_ids(what: str, column: str) -> str:
    """Return the column of ids whose log-probs ``column`` holds, and declare the latter.

    Raises:
        UserError: there is no such column, or it does not go to the device.
    """
    name = column.removeprefix(OF_IDS)
    try:
        ids = find_column(name)
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error
    if not (ids.per == "token" and ids.to_device and np.dtype(ids.dtype).kind == "i"):
        raise UserError(f"{what}: the column '{name}' of ids must be integers per token, and to_device.")
    meaning = f"log-probability of '{name}' under the policy before the step's updates"
    declare(Column(column, np.float32, "token", meaning, fill=np.nan, merge="first"))
    return name
