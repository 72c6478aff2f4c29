"""The plan of a loss on the head: which rows are multiplied, in which order, decided before the forward.

    schedule          when                                                           FLOP, in N H V
    logprob_only      no gradient is asked for                                       2
    fused_forward     a target's loss depends on that target alone                   2 + 4 f (frozen head: 2 + 2 f)
    sequence_aligned  it depends on the whole path: chunks of whole paths            2 + 4 f (frozen head: 2 + 2 f)
    frozen_head       it does, paths of two chunks meet, head not trained            4
    two_phase         it depends on the whole batch, or on something else than a path   2 + 6 f

Rows on paths of two chunks (the last of a prompt with its siblings' first tokens, the trunk of a tree) are *shared*:
`sequence_aligned` scores them first, makes their gradient last, and multiplies them once more for it, 2 f.

With several terms the one that needs most decides. Targets that cannot have a gradient from any (masked, or of zero
advantage without a KL or entropy term) are left out before the first product: N counts the rows that remain. f is the
share of these that turn out not to be clipped. They are known after the log-sum-exp, so a CPU leaves the others out of
the last two products; on a GPU that would take a host synchronisation, so it multiplies them: f = 1.

Planning reads the data. On a GPU that waits for it, once: make the plan where the batch is made, from tensors on the
host (``torch.from_numpy`` of arrays), move it with ``to``, and the loss itself never waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import Arguments
from ..linear_logprob.chunked import chunk_rows
from ..policy_loss import Objective, PolicyFields
from .align import Alignment, align
from .terms import AnyTerm, Term, live

ONE_PASS = ("fused_forward", "sequence_aligned")
"""Schedules whose gradients are made in the forward."""

Schedule = Literal["logprob_only", "fused_forward", "sequence_aligned", "frozen_head", "two_phase"]


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """The rows and targets to compute, in order; `plan_policy_loss` makes it, ``explain()`` describes it.

    P targets in R rows are computed, of M targets in N rows given. See the module's description for the schedules.
    """

    schedule: Schedule
    row: Tensor | None  # [R] int64, rows of hidden that are needed, in order of their use; None: all
    place: Tensor | None  # [P] int64, of each target in the caller's order, by row; None: one a row, in order
    start: Tensor  # [R + 1] int64, the targets of row i are start[i] .. start[i + 1]
    row_cuts: tuple[int, ...]  # chunks of rows: cuts[k] .. cuts[k + 1], from `shared` on; (): cut where it runs
    target_cuts: tuple[int, ...]  # and of their targets
    path_cuts: tuple[int, ...]  # of the caller's targets: (first, last) of the trees a chunk is in; or empty
    shared: int  # the first so many of the R rows are on paths of several chunks
    size: tuple[int, int]  # (N, M)
    head: tuple[int, int]  # (V, H)
    frozen: bool
    gradient_share: float
    batch: int | None  # `fingerprint` of the batch; None: every target is computed, whatever the batch

    def row_of_target(self) -> Tensor | None:  # [P] int64
        """Return the row of each target among the R; None: one a row, in order."""
        if self.place is None:
            return None
        rows = torch.arange(len(self.start) - 1, device=self.start.device)
        return torch.repeat_interleave(rows, self.start.diff(), output_size=len(self.place))

    def flop(self) -> float:
        """Return the expected FLOP of the matrix products."""
        V, H = self.head
        return (self._of_schedule() * self.row_cuts[-1] + 2 * self.gradient_share * self.shared) * V * H

    def products(self) -> float:
        """Return the FLOP in units of N H V, N being the rows computed."""
        return self._of_schedule() + 2 * self.gradient_share * self.shared / max(self.row_cuts[-1], 1)

    def _of_schedule(self) -> float:
        """Return the FLOP of a row in units of H V, without the extra products of shared rows."""
        f = self.gradient_share
        products = {
            "logprob_only": 2.0,
            "fused_forward": 2 + (2 if self.frozen else 4) * f,
            "sequence_aligned": 2 + (2 if self.frozen else 4) * f,
            "frozen_head": 4.0,
            "two_phase": 2 + (4 if self.frozen else 6) * f,
        }
        return products[self.schedule]

    def traffic(self) -> float:
        """Return the bytes that tiles of logits and the head's gradient move, besides the products' own operands.

        A tile of fp32 is written, read by the statistics, and with a gradient read again and written. The fp32 gradient
        of the head is read and written once a chunk.
        """
        V, H = self.head
        scored = self.schedule == "logprob_only"
        apart = self.row_cuts[-1] - self.row_cuts[0]  # rows that no two chunks share
        tiles = (apart * (2 if scored else 4) + self.shared * (4 + 2)) * V * 4
        chunks = len(self.row_cuts) - 1 + (-(-self.shared // self._most()) if self.shared else 0)
        head = 0 if self.frozen or scored else chunks * V * H * 8
        return float(tiles + head)

    def memory(self, itemsize: int = 4) -> int:
        """Return the bytes besides inputs, outputs and gradients: a tile of fp32 logits, and its gradient in another
        dtype.

        Args:
            itemsize: bytes of an element of hidden.
        """
        V, H = self.head
        gathered = 0 if self.row is None else len(self.row) * H * itemsize
        return self._most() * V * (4 if itemsize == 4 else 4 + itemsize) + gathered

    def _most(self) -> int:
        """Return the rows of the largest chunk."""
        return max((b - a for a, b in zip(self.row_cuts, self.row_cuts[1:], strict=False)), default=self.shared)

    def check(self, terms: Sequence[AnyTerm], row: Tensor | None, hidden: Tensor, weight: Tensor) -> None:
        """Refuse another batch. Sizes are compared on the host, targets and paths on their device: nothing waits.

        Raises:
            ValueError: another number of rows or targets, another head, other targets that can learn, or other rows or
                paths of them (these on a GPU: a device-side assertion).
        """
        N, M = len(hidden), len(live(terms[0]))
        if self.size != (N, M) or self.head != tuple(weight.shape):
            raise ValueError(
                f"linear_policy_loss: the plan is for {self.size[0]} rows, {self.size[1]} targets and a head of "
                f"{list(self.head)}; here are {N}, {M} and {list(weight.shape)}: plan this batch."
            )
        if self.batch is not None:
            Arguments("linear_policy_loss", "hidden", hidden).holds(
                fingerprint(terms, row) == self.batch,
                "the plan is of other masks, advantages, rows or paths: plan this batch",
            )

    def explain(self) -> str:
        """Return the schedule, FLOP and memory in a few lines."""
        N, M = self.size
        V, H = self.head
        rows, targets = self.row_cuts[-1], self.target_cuts[-1]
        return "\n".join(
            [
                f"schedule {self.schedule}{' (frozen head)' if self.frozen else ''}: {rows} of {N} rows, "
                f"{targets} of {M} targets, in {len(self.row_cuts) - 1} chunks"
                + (f", {self.shared} rows shared by chunks" if self.shared else ""),
                f"{self.flop() / 1e12:.3g} TFLOP, {self.products():.2f} N H V of the rows computed; plain PyTorch "
                f"{6.0 * N * H * V / 1e12:.3g} TFLOP",
                "tiles of fp32 logits",
                f"{self.traffic() / 2**30:.3g} GiB moved outside the products",
                f"{self.memory() / 2**20:.0f} MiB besides gradients; plain PyTorch {2 * 4 * N * V / 2**20:.0f} MiB",
            ]
        )

    def to(self, device: torch.device | str) -> HeadPlan:
        """Return the same plan with its tensors on ``device``."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, non_blocking=True)

        return replace(self, row=move(self.row), place=move(self.place), start=self.start.to(device, non_blocking=True))


def plan_policy_loss(fields: PolicyFields, objective: Objective, **options: Any) -> HeadPlan:
    """Plan `linear_policy_loss`: `plan_terms_loss` of a single term.

    Args:
        fields, objective: as in `linear_policy_loss`; the tensors may be on the host.
        options: the keyword arguments of `plan_terms_loss`.

    Raises:
        ValueError, IndexError: as `plan_terms_loss`.
    """
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
        terms: of the batch, their tensors on any one device; on the host nothing waits for a GPU.
        num_rows, vocabulary, hidden_size: N, V and H.
        device: where the loss will run; it decides the size of chunks.
        row: ``[M]``, row of each target, on the device of ``terms``; default: one target a row.
        frozen: True if the head takes no gradient.
        gradient: False if no gradient is wanted.
        gradient_share: share of rows that had a gradient in the last step (1 - the share clipped), for ``explain``.

    Raises:
        ValueError: a shape, dtype or device does not fit; without ``row`` there must be as many targets as rows.
        IndexError: a row is out of range (CPU only; on a GPU the program stops).
    """
    alive = _checked(terms, num_rows, vocabulary, hidden_size, row, gradient_share)
    C = chunk_rows(num_rows, vocabulary, torch.device(device))
    place = alive.nonzero().flatten()
    of_target = place if row is None else row[place].long()
    if row is not None:
        of_target, order = torch.sort(of_target, stable=True)
        place = place[order]
    rows, rank, count = torch.unique_consecutive(of_target, return_inverse=True, return_counts=True)
    schedule, aligned = _schedule(terms, place, rank, C, frozen=frozen, gradient=gradient)
    if aligned is not None and not aligned.in_order:
        rows, count = rows[aligned.row], count[aligned.row]
        new_rank = torch.empty_like(aligned.row)
        new_rank[aligned.row] = torch.arange(len(rows), device=rows.device)
        place = place[torch.sort(new_rank[rank], stable=True).indices]
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])
    row_cuts = even_cuts(len(rows), C) if aligned is None else aligned.row_cuts
    whole = len(rows) == num_rows and (aligned is None or aligned.in_order)
    return HeadPlan(
        schedule=schedule,
        row=None if whole else rows,
        place=None if whole and row is None else place,
        start=start,
        row_cuts=row_cuts,
        target_cuts=tuple(start[list(row_cuts)].tolist()),
        path_cuts=() if aligned is None else aligned.path_cuts,
        shared=0 if aligned is None else aligned.shared,
        size=(num_rows, len(alive)),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=gradient_share,
        batch=int(fingerprint(terms, row)),
    )


def _checked(
    terms: Sequence[AnyTerm],
    num_rows: int,
    vocabulary: int,
    hidden_size: int,
    row: Tensor | None,
    gradient_share: float,
) -> Tensor:  # [M] bool
    """Check the arguments of `plan_terms_loss`; return the targets that some term needs."""
    of_terms = [live(t) for t in terms]
    check = Arguments("plan_policy_loss", "the terms", of_terms[0])
    for of_term in of_terms:
        check.mask("the terms", of_term, of_terms[0].shape, " like the first")
    alive = functools.reduce(torch.logical_or, of_terms)
    M = len(alive)
    for name, size in (("num_rows", num_rows), ("vocabulary", vocabulary), ("hidden_size", hidden_size)):
        check.size(name, size, least=0 if name == "num_rows" else 1)
    check.number("gradient_share", gradient_share, least=0)
    for t in terms:
        if isinstance(t, Term) and t.fields.paths is not None:
            t.fields.paths.check(check, M)
    if row is None:
        check.require(num_rows == M, f"{M} targets for {num_rows} rows; give row= to place them otherwise")
    else:
        check.integers("row", row, (M,), " like the terms")
        check.index("row", row, num_rows)
    return alive


def _schedule(
    terms: Sequence[AnyTerm],
    place: Tensor,  # [P] int64, of each target in the terms, by row
    rank: Tensor,  # [P] int64, of the target's row among those that are needed
    chunk: int,
    *,
    frozen: bool,
    gradient: bool,
) -> tuple[Schedule, Alignment | None]:
    """Return the schedule, and the chunks of whole paths where that is `sequence_aligned`."""
    scopes = {t.objective.scope if isinstance(t, Term) else "batch" for t in terms}
    if not gradient:
        return "logprob_only", None
    if scopes == {"token"}:
        return "fused_forward", None
    aligned = None if "batch" in scopes else align(terms, place, rank, chunk)
    if frozen and not _need_entropy(terms) and (aligned is None or aligned.shared):
        return "frozen_head", None
    return ("two_phase" if aligned is None else "sequence_aligned"), aligned


def fingerprint(terms: Sequence[AnyTerm], row: Tensor | None) -> Tensor:  # [] int64
    """Return a hash of the data that a plan depends on: the targets needed, their rows, and paths where they matter."""
    alive = functools.reduce(torch.logical_or, map(live, terms))
    x = place = torch.arange(len(alive), device=alive.device)
    paths = [t.fields.paths for t in terms if isinstance(t, Term) and t.objective.scope == "path"]
    for values in (place if row is None else row, *(index.target_end for index in paths if index is not None)):
        x = (x + values.long()) * -7046029254386353131
        x = x ^ (x >> 31)
    return torch.where(alive, x, 0).sum()


def plan_everything(
    num_rows: int,
    vocabulary: int,
    hidden_size: int,
    device: torch.device,
    frozen: bool,
) -> HeadPlan:
    """Return the plan that reads no data: every target, one a row, for terms of tokens.

    Under a compiler the op cuts the rows, because the number of chunks would make a graph of its own.
    """
    compiling = torch.compiler.is_compiling()
    cuts = () if compiling else even_cuts(num_rows, chunk_rows(num_rows, vocabulary, device))
    return HeadPlan(
        schedule="fused_forward",
        row=None,
        place=None,
        start=torch.arange(num_rows + 1, device=device),
        row_cuts=cuts,
        target_cuts=cuts,
        path_cuts=(),
        shared=0,
        size=(num_rows, num_rows),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=1.0,
        batch=None,
    )


def _need_entropy(terms: Sequence[AnyTerm]) -> bool:
    return any(isinstance(t, Term) and t.objective.needs_entropy for t in terms)


def even_cuts(rows: int, chunk: int) -> tuple[int, ...]:
    """Return the boundaries of chunks of ``chunk`` rows."""
    return (*range(0, rows, max(chunk, 1)), rows)
