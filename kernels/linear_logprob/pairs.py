"""Pairs of a row and a token to score in it, grouped by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Pairs to score, grouped by row: those of row i are ``start[i] .. start[i + 1]``."""

    start: Tensor  # [N + 1] int64
    target: Tensor  # [M] int64, in row order
    order: Tensor | None  # [M] int64: place of each pair in the caller's order; None: the same order
    one_a_row: bool

    @property
    def row(self) -> Tensor:  # [M] int64
        """The row of each pair."""
        rows = torch.arange(len(self.start) - 1, device=self.start.device)
        if self.one_a_row:
            return rows
        return torch.repeat_interleave(rows, self.start.diff(), output_size=len(self.target))

    def of_rows(self, rows: Tensor) -> tuple[Pairs, Tensor]:
        """The pairs of ``rows`` [K], ascending, and which of these pairs they are ``[P] int64``."""
        first, count = self.start[:-1][rows], self.start.diff()[rows]
        start = torch.cat([count.new_zeros(1), count.cumsum(0)])
        pair = torch.repeat_interleave(first - start[:-1], count) + torch.arange(int(start[-1]), device=count.device)
        return Pairs(start, self.target[pair], None, self.one_a_row), pair


def group_by_row(target: Tensor, row: Tensor | None, N: int) -> Pairs:
    if row is None:
        return Pairs(torch.arange(N + 1, device=target.device), target, None, True)
    row, order = torch.sort(row, stable=True)
    edges = torch.arange(N + 1, device=row.device)
    return Pairs(torch.searchsorted(row, edges), target[order], order, False)


def sum_by_row(pairs: Pairs, values: Tensor) -> Tensor:
    """``[M] -> [N]``: sum of the values of each row's pairs (in row order), in a fixed order."""
    if pairs.one_a_row:
        return values
    before = torch.cat([values.new_zeros(1, dtype=torch.float64), values.cumsum(0, dtype=torch.float64)])
    return (before[pairs.start[1:]] - before[pairs.start[:-1]]).to(values.dtype)
