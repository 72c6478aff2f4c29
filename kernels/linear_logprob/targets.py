"""Targets: tokens to score in a row of hidden, grouped by row, and the caller's `extra_ids` as further targets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import Arguments


class Targets(NamedTuple):
    """Targets grouped by row: those of row i are ``start[i] .. start[i + 1]``."""

    start: Tensor  # [N + 1] int64
    target: Tensor  # [M] int64, in row order
    order: Tensor | None  # [M] int64: place of each target in the caller's order; None: the same order
    one_a_row: bool  # row i has exactly target i

    @property
    def row(self) -> Tensor:  # [M] int64
        """Return the row of each target."""
        rows = torch.arange(len(self.start) - 1, device=self.start.device)
        if self.one_a_row:
            return rows
        return torch.repeat_interleave(rows, self.start.diff(), output_size=len(self.target))

    def of_rows(self, rows: Tensor) -> tuple[Targets, Tensor]:
        """Return the targets of ``rows`` [K], in that order, and their places ``[P] int64`` in ``target``."""
        first, count = self.start[:-1][rows], self.start.diff()[rows]
        start = torch.cat([count.new_zeros(1), count.cumsum(0)])
        place = torch.repeat_interleave(first - start[:-1], count) + torch.arange(int(start[-1]), device=count.device)
        return Targets(start, self.target[place], None, self.one_a_row), place


def group_by_row(target: Tensor, row: Tensor | None, N: int) -> Targets:
    """Return ``target [M]`` grouped by ``row [M]``, rows 0 to N - 1; without ``row`` one a row."""
    if row is None:
        return Targets(torch.arange(N + 1, device=target.device), target, None, True)
    row, order = torch.sort(row, stable=True)
    edges = torch.arange(N + 1, device=row.device)
    return Targets(torch.searchsorted(row, edges), target[order], order, False)


def sum_by_row(targets: Targets, values: Tensor) -> Tensor:
    """Return ``[N]``: the sum of ``values [M]`` (in row order) over each row's targets, in a fixed order."""
    if targets.one_a_row:
        return values
    # not differences of one running sum, by which a NaN or inf would reach the rows after its own
    of_row = torch.segment_reduce(values.double(), "sum", lengths=targets.start.diff(), unsafe=True)
    return of_row.to(values.dtype)


ABSENT = -1


class MoreTargets:
    """The caller's M targets followed by N K others, one for each entry of ``extra_ids``."""

    def __init__(
        self,
        extra_ids: Tensor,  # [N, K] int
        target: Tensor,  # [M] int
        row: Tensor | None,  # [M] int
        N: int,
        V: int | None,  # None: this rank has only a part of the vocabulary
    ) -> None:
        check = Arguments("linear_logprob", "target", target)
        check.integers("extra_ids", extra_ids, (N, "K"))
        if V is not None and target.device.type == "cpu":  # on a GPU its log-prob is NaN
            check.index("extra_ids", extra_ids, V, low=ABSENT, remedy=f"{ABSENT} stands for none")
        rows = torch.arange(N, device=target.device)
        self.absent = extra_ids == ABSENT  # [N, K]
        # An absent entry scores token 0 instead, so that no shape depends on the ids.
        more = extra_ids.long().masked_fill(self.absent, 0)
        self.targets = len(target)
        self.target = torch.cat([target.long(), more.flatten()])  # [M + N K]
        self.row = torch.cat(
            [rows if row is None else row.long(), rows[:, None].expand(extra_ids.shape).flatten()]
        )  # [M + N K]

    def split(self, logprob: Tensor) -> tuple[Tensor, Tensor]:
        """Split ``logprob [M + N K]`` into the caller's ``[M]`` and the extra ``[N, K]``, NaN where absent."""
        extra = logprob[self.targets :].view(self.absent.shape)
        return logprob[: self.targets], extra.masked_fill(self.absent, torch.nan)
