"""What a loss on the head will multiply, and in which order: decided before the forward from what is known then.

    schedule          when                                                           FLOP, in N H V
    logprob_only      no gradient is asked for                                       2
    fused_forward     a target's loss depends on that target alone                   2 + 4 f (frozen head: 2 + 2 f)
    sequence_aligned  it depends on the whole path: whole trees in one chunk         2 + 4 f (frozen head: 2 + 2 f)
    frozen_head       it does, a path is longer than a chunk, head not trained       4
    two_phase         as before, head trained; or it depends on the whole batch      2 + 6 f

With several terms the one that needs most decides. Targets that cannot have a gradient from any (masked, or of zero
advantage without a KL or entropy term) are left out before the first product: N counts the rows that remain. f is the
share of these that turn out not to be clipped; they are known after the log-sum-exp, so a CPU leaves the others out of
the last two products. A GPU would have to be waited for, and multiplies them: f = 1.

Planning looks at the data. On a GPU that waits for it, once: make the plan where the batch is made, from tensors on the
host, and the loss itself never waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..linear_logprob.chunked import chunk_rows
from ..policy_loss import Objective, PolicyFields
from .terms import AnyTerm, Term, live

ONE_PASS = ("fused_forward", "sequence_aligned")
"""Schedules whose gradients are made in the forward."""

Schedule = Literal["logprob_only", "fused_forward", "sequence_aligned", "frozen_head", "two_phase"]


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """See the module's description; `plan_policy_loss` makes it, ``explain()`` says what it is.

    P targets in R rows are computed, of M targets in N rows given.
    """

    schedule: Schedule
    row: Tensor | None  # [R] int64, rows of hidden that are needed, ascending; None: all
    place: Tensor | None  # [P] int64, of each target in the caller's order, by row; None: one a row, in order
    start: Tensor  # [R + 1] int64, the targets of row i are start[i] .. start[i + 1]
    row_cuts: tuple[int, ...]  # chunks of rows: cuts[k] .. cuts[k + 1]
    target_cuts: tuple[int, ...]  # and of their targets
    path_cuts: tuple[int, ...]  # of the caller's targets, for chunks of whole paths: (first, last) of each; else empty
    given: tuple[int, int]  # (N, M)
    head: tuple[int, int]  # (V, H)
    frozen: bool
    gradient_share: float

    def row_of_target(self) -> Tensor | None:  # [P] int64
        """Row of each target among the R; None: one a row, in order."""
        if self.place is None:
            return None
        rows = torch.arange(len(self.start) - 1, device=self.start.device)
        return torch.repeat_interleave(rows, self.start.diff(), output_size=len(self.place))

    def flop(self) -> float:
        """Of the matrix products, expected."""
        f = self.gradient_share
        products = {
            "logprob_only": 2.0,
            "fused_forward": 2 + (2 if self.frozen else 4) * f,
            "sequence_aligned": 2 + (2 if self.frozen else 4) * f,
            "frozen_head": 4.0,
            "two_phase": 2 + (4 if self.frozen else 6) * f,
        }
        V, H = self.head
        return products[self.schedule] * self.row_cuts[-1] * V * H

    def traffic(self) -> float:
        """Bytes that tiles of logits and the head's gradient move, beside what the products themselves read.

        A tile of fp32 is written, read by the statistics, and with a gradient read again and written; the fp32 gradient
        of the head is read and written once a chunk.
        """
        V, H = self.head
        tiles = self.row_cuts[-1] * V * 4 * (2 if self.schedule == "logprob_only" else 4)
        head = 0 if self.frozen or self.schedule == "logprob_only" else (len(self.row_cuts) - 1) * V * H * 8
        return float(tiles + head)

    def memory(self, itemsize: int = 4) -> int:
        """Bytes beside inputs, outputs and gradients: a tile of fp32 logits, and its gradient in another dtype.

        Args:
            itemsize: bytes of an element of hidden.
        """
        V, H = self.head
        most = max((b - a for a, b in zip(self.row_cuts, self.row_cuts[1:], strict=False)), default=0)
        gathered = 0 if self.row is None else len(self.row) * H * itemsize
        return most * V * (4 if itemsize == 4 else 4 + itemsize) + gathered

    def explain(self) -> str:
        """The choice, FLOP and memory, in a few lines."""
        N, M = self.given
        V, H = self.head
        rows, targets = self.row_cuts[-1], self.target_cuts[-1]
        return "\n".join(
            [
                f"schedule {self.schedule}{' (frozen head)' if self.frozen else ''}: {rows} of {N} rows, "
                f"{targets} of {M} targets, in {len(self.row_cuts) - 1} chunks",
                f"{self.flop() / 1e12:.3g} TFLOP; plain PyTorch {6.0 * N * H * V / 1e12:.3g} TFLOP",
                f"{self.traffic() / 2**30:.3g} GiB moved outside the products",
                f"{self.memory() / 2**20:.0f} MiB beside gradients; plain PyTorch {2 * 4 * N * V / 2**20:.0f} MiB",
            ]
        )

    def to(self, device: torch.device | str) -> HeadPlan:
        """The same plan with its tensors on ``device``."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, non_blocking=True)

        return replace(self, row=move(self.row), place=move(self.place), start=self.start.to(device, non_blocking=True))


def plan_policy_loss(fields: PolicyFields, objective: Objective, **options: Any) -> HeadPlan:
    """Plan `linear_policy_loss`: `plan_terms_loss` of its only term."""
    return plan_terms_loss([Term(fields, objective, 1.0)], **options)


def plan_terms_loss(
    terms: Sequence[AnyTerm],
    *,
    num_rows: int,
    vocabulary: int,
    hidden_size: int,
    device: torch.device | str,
    row: Tensor | None = None,  # [M]
    frozen: bool = False,
    gradient: bool = True,
    gradient_share: float = 1.0,
) -> HeadPlan:
    """Plan `linear_terms_loss` for a batch.

    Args:
        terms: of the batch, their tensors on any one device; see the module's description for where to have them.
        num_rows, vocabulary, hidden_size: N, V and H.
        device: where the loss will run: it decides how large chunks are.
        row: row of each target, on the device of ``terms``; default: one target a row.
        frozen: the head takes no gradient.
        gradient: whether any gradient is wanted.
        gradient_share: share of rows that had a gradient in the last step (1 - the share clipped), for ``explain``.

    Raises:
        ValueError: without ``row`` there must be as many targets as rows.
    """
    alive = functools.reduce(torch.logical_or, map(live, terms))
    M = len(alive)
    if row is None and num_rows != M:
        raise ValueError(f"plan_policy_loss: {M} targets for {num_rows} rows; give row= to place them otherwise.")
    C = chunk_rows(num_rows, vocabulary, torch.device(device))
    place = alive.nonzero().flatten()
    of_target = place if row is None else row[place].long()
    if row is not None:
        of_target, order = torch.sort(of_target, stable=True)
        place = place[order]
    rows, rank, count = torch.unique_consecutive(of_target, return_inverse=True, return_counts=True)
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])

    schedule: Schedule = "logprob_only"
    row_cuts = even_cuts(len(rows), C)
    path_cuts: tuple[int, ...] = ()
    scopes = {t.objective.scope if isinstance(t, Term) else "batch" for t in terms}
    if gradient and scopes == {"token"}:
        schedule = "fused_forward"
    elif gradient:
        aligned = None if "batch" in scopes else _aligned_cuts(terms, place, rank, C)
        if aligned is not None:
            schedule, (row_cuts, path_cuts) = "sequence_aligned", aligned
        else:
            of_entropy = any(isinstance(t, Term) and t.objective.needs_entropy for t in terms)
            schedule = "frozen_head" if frozen and not of_entropy else "two_phase"
    whole = len(rows) == num_rows
    return HeadPlan(
        schedule=schedule,
        row=None if whole else rows,
        place=None if whole and row is None else place,
        start=start,
        row_cuts=row_cuts,
        target_cuts=tuple(start[list(row_cuts)].tolist()),
        path_cuts=path_cuts,
        given=(num_rows, M),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=gradient_share,
    )


def plan_everything(num_rows: int, vocabulary: int, hidden_size: int, device: torch.device, frozen: bool) -> HeadPlan:
    """Every target, one a row, for terms of tokens: the plan that needs no look at the data."""
    cuts = even_cuts(num_rows, chunk_rows(num_rows, vocabulary, device))
    return HeadPlan(
        schedule="fused_forward",
        row=None,
        place=None,
        start=torch.arange(num_rows + 1, device=device),
        row_cuts=cuts,
        target_cuts=cuts,
        path_cuts=(),
        given=(num_rows, num_rows),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=1.0,
    )


def even_cuts(rows: int, chunk: int) -> tuple[int, ...]:
    return (*range(0, rows, max(chunk, 1)), rows)


def _aligned_cuts(
    terms: Sequence[AnyTerm],
    place: Tensor,  # [P] of the targets needed, by row
    rank: Tensor,  # [P] which of the needed rows is theirs
    chunk: int,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Cuts of rows and of targets that no path crosses, with at most ``chunk`` rows between them, if there are.

    A *block* is a shortest run of targets that no path leaves: a sequence, or a tree.
    """
    indices = [t.fields.paths for t in terms if isinstance(t, Term) and t.objective.scope == "path"]
    if not len(place) or any(paths is None for paths in indices):
        return None
    end = functools.reduce(torch.maximum, [paths.target_end.long() for paths in indices if paths is not None])
    inside = torch.arange(1, len(end), device=end.device)
    edge = torch.cat([inside.new_zeros(1), inside[end.cummax(0).values[:-1] <= inside], inside.new_tensor([len(end)])])
    block = torch.searchsorted(edge[1:], place, right=True)
    first = torch.full((len(edge) - 1,), len(place), device=place.device).scatter_reduce(0, block, rank, "amin")
    last = torch.full_like(first, -1).scatter_reduce(0, block, rank, "amax")
    live = (last >= 0).nonzero().flatten()
    first, last = first[live], last[live]
    if (last - first).max() >= chunk or (first[1:] <= last[:-1]).any():
        return None
    row_cuts, path_cuts = [0], []
    opened = int(edge[live[0]])
    ends = edge[live + 1].tolist()
    begins = edge[live].tolist()
    for k, (top, bottom) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if bottom >= row_cuts[-1] + chunk:
            row_cuts.append(top)
            path_cuts += [opened, ends[k - 1]]
            opened = begins[k]
    return (*row_cuts, int(last[-1]) + 1), (*path_cuts, opened, ends[-1])
