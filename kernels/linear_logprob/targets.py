"""Targets, tokens to score in a row of hidden, grouped by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """Grouped by row: those of row i are ``start[i] .. start[i + 1]``."""

    start: Tensor  # [N + 1] int64
    target: Tensor  # [M] int64, in row order
    order: Tensor | None  # [M] int64: place of each target in the caller's order; None: the same order
    one_a_row: bool

    @property
    def row(self) -> Tensor:  # [M] int64
        """The row of each target."""
        rows = torch.arange(len(self.start) - 1, device=self.start.device)
        if self.one_a_row:
            return rows
        return torch.repeat_interleave(rows, self.start.diff(), output_size=len(self.target))

    def of_rows(self, rows: Tensor) -> tuple[Targets, Tensor]:
        """The targets of ``rows`` [K], in their order, and their places among these ``[P] int64``."""
        first, count = self.start[:-1][rows], self.start.diff()[rows]
        start = torch.cat([count.new_zeros(1), count.cumsum(0)])
        place = torch.repeat_interleave(first - start[:-1], count) + torch.arange(int(start[-1]), device=count.device)
        return Targets(start, self.target[place], None, self.one_a_row), place


def group_by_row(target: Tensor, row: Tensor | None, N: int) -> Targets:
    if row is None:
        return Targets(torch.arange(N + 1, device=target.device), target, None, True)
    row, order = torch.sort(row, stable=True)
    edges = torch.arange(N + 1, device=row.device)
    return Targets(torch.searchsorted(row, edges), target[order], order, False)


def sum_by_row(targets: Targets, values: Tensor) -> Tensor:
    """``[M] -> [N]``: sum of the values of each row's targets (in row order), in a fixed order."""
    if targets.one_a_row:
        return values
    before = torch.cat([values.new_zeros(1, dtype=torch.float64), values.cumsum(0, dtype=torch.float64)])
    return (before[targets.start[1:]] - before[targets.start[:-1]]).to(values.dtype)
