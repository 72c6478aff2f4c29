"""Drafts of what branches will sample next, and how they are verified.

A sample's random number is a function of (seed of the branch, position), so one step can draw a sample at every
position of a draft, each with its own number. The longest run of samples that agree with the draft is what steps of one
token would have sampled; the first that does not agree is a valid sample too. A draft changes the speed and never a
token.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .rows import RowTable
from .stops import GO_ON, Stops

with contextlib.suppress(ImportError):  # `KvCache` says what is missing
    from ._host import cut_drafts

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

    def sampled(self, rows: RowTable, slots: Array, offset: Array, token: Array, ended: Array, version: int) -> None:
        """Be told what a step sampled, when ``rows`` have it: the branches' slots [E] int64, which of its branch's new
        tokens each one is [E], the tokens [E] int64, -1 for one that failed, which of them end a segment [E] bool, and
        the version of the policy."""

    def took(self, queries: int, seconds: float) -> None:
        """Be told how long a step of so many rows took, but for forking and ending branches, where drafts save
        nothing."""


def fit(rows: RowTable, stops: Stops, slots: Array, counts: Array, tokens: Array, room: int) -> tuple[Array, Array]:
    """Cut drafts to what can come to stand in a response: nothing behind a token that ends it or its segment, nothing
    where a branch forks, and at most ``room`` tokens in all."""
    most = np.where(rows.forks[slots] > 0, 0, rows.segment_end[slots] - rows.length[slots] - 1)
    ends = stops.tokens(np.repeat(rows.stop_table[slots], counts), tokens) != GO_ON
    return cut_drafts(counts, tokens, ends, most, room)
