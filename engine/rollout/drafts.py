"""Drafts of what branches will sample next, and how they are verified.

A sample's random number is a function of (seed of the branch, position), so one step can draw a sample at every
position of a draft, each with its own number. The longest run of samples that agree with the draft is what steps of one
token would have sampled; the first that does not agree is a valid sample too. A draft changes the speed and never a
token.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .rows import RowTable
from .stops import GO_ON, Stops

Array = npt.NDArray[Any]


class Drafter(Protocol):
    """Guesses what running branches will sample."""

    def propose(self, rows: RowTable, slots: Array, others: int, room: int) -> tuple[Array, Array]:
        """Drafts for a step.

        Args:
            slots: [R] int64, the running branches.
            others: rows of the step besides theirs.
            room: most tokens in all.

        Returns:
            how many tokens each branch gets [R] int64, and the tokens [sum] int64, one branch after the other.
        """

    def sampled(self, rows: RowTable, slots: Array, offset: Array, token: Array, version: int) -> None:
        """Be told what a step sampled, when ``rows`` have it: the branches' slots [E] int64, which of its branch's new
        tokens each one is [E], the tokens [E] int64, -1 for one that failed, and the version of the policy."""

    def took(self, queries: int, seconds: float) -> None:
        """Be told how long a step of so many rows took, but for forking and ending branches, where drafts save
        nothing."""


def fit(rows: RowTable, stops: Stops, slots: Array, counts: Array, tokens: Array, room: int) -> tuple[Array, Array]:
    """Cut drafts to what can come to stand in a response: nothing behind a token that ends it or its segment, nothing
    where a branch forks, and at most ``room`` tokens in all."""
    owner = np.repeat(np.arange(len(slots)), counts)
    first = np.cumsum(counts) - counts
    most = np.where(rows.forks[slots] > 0, 0, rows.segment_end[slots] - rows.length[slots] - 1)
    bad = np.arange(len(tokens)) - first[owner] >= most[owner]
    bad |= stops.tokens(rows.stop_table[slots[owner]], tokens) != GO_ON
    fits = ~after_any(bad, first[owner]) & ~bad
    fits &= np.cumsum(fits) <= room
    return np.bincount(owner[fits], minlength=len(slots)), tokens[fits]


def on_path(token: Array, behind: Array, offset: Array) -> Array:  # each [E] -> [E] bool
    """Which samples stand behind what was sampled before them. Sample i was drawn behind the token ``behind[i]``, and
    ``offset[i]`` tokens of the draft stand before it, whose samples are the entries before i."""
    missed = np.zeros(len(token), np.bool_)
    missed[1:] = (offset[1:] > 0) & (token[:-1] != behind[1:])
    return ~after_any(missed, np.arange(len(token)) - offset, inclusive=True)


def up_to_end(ends: Array, offset: Array) -> Array:  # [E] bool, [E] int64 -> [E] bool
    """The samples of each branch up to the first that ends it."""
    return ~after_any(ends, np.arange(len(ends)) - offset)


def after_any(marked: Array, first: Array, *, inclusive: bool = False) -> Array:  # [N] bool, [N] int64 -> [N] bool
    """Whether one is marked among the entries from ``first[i]`` up to i, itself left out unless ``inclusive``."""
    before = np.cumsum(marked) - marked
    return before + (marked if inclusive else 0) > before[first]
