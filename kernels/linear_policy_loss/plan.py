"""What `linear_policy_loss` will multiply, and in which order: decided before the forward from what is known then.

    schedule          when                                                           FLOP, in N H V
    logprob_only      no gradient is asked for                                       2
    fused_forward     a token's loss depends on that token alone                     2 + 4 f (frozen head: 2 + 2 f)
    sequence_aligned  it depends on the whole path: whole trees in one chunk         2 + 4 f (frozen head: 2 + 2 f)
    frozen_head       it does, a path is longer than a chunk, head not trained       4
    two_phase         as before, head trained; or it depends on the whole batch      2 + 6 f

Pairs that cannot have a gradient (masked, or of zero advantage without a KL or entropy term) are left out before the
first product: N counts the rows that remain. f is the share of these that turn out not to be clipped; they are known
after the log-sum-exp, so a CPU leaves the others out of the last two products. A GPU would have to be waited for: it
multiplies them (f = 1), unless the share measured in the last step is below `COUNT_BELOW`; then kernels that read the
count on the device take the place of the library's, which are faster by the row.

Planning looks at the data. On a GPU that waits for it, once: make the plan where the batch is made, from tensors on the
host, and the loss itself never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..checks import Arguments
from ..linear_logprob.chunked import chunk_rows
from ..policy_loss import Objective, PolicyFields

COUNT_BELOW = 0.7
"""Share of rows with a gradient below which products that count on the device are taken (not tuned on a GPU yet)."""

Schedule = Literal["logprob_only", "fused_forward", "sequence_aligned", "frozen_head", "two_phase"]


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """See the module's description; `plan_policy_loss` makes it, ``explain()`` says what it is.

    P pairs in R rows are computed, of M pairs in N rows given.
    """

    schedule: Schedule
    row: Tensor | None  # [R] int64, rows of hidden that are needed, ascending; None: all
    pair: Tensor | None  # [P] int64, the caller's number of each pair, by row; None: one a row, in order
    start: Tensor  # [R + 1] int64, the pairs of row i are start[i] .. start[i + 1]
    row_cuts: tuple[int, ...]  # chunks of rows: cuts[k] .. cuts[k + 1]
    pair_cuts: tuple[int, ...]  # and of their pairs
    block_cuts: tuple[int, ...]  # of the caller's pairs, for chunks of whole paths: (first, last) of each; else empty
    given: tuple[int, int]  # (N, M)
    head: tuple[int, int]  # (V, H)
    frozen: bool
    gradient_share: float
    count_on_device: bool = False  # see `COUNT_BELOW`

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
        rows, pairs = self.row_cuts[-1], self.pair_cuts[-1]
        return "\n".join(
            [
                f"schedule {self.schedule}{' (frozen head)' if self.frozen else ''}: {rows} of {N} rows, "
                f"{pairs} of {M} pairs, in {len(self.row_cuts) - 1} chunks"
                + (", rows without gradient left out on the device" if self.count_on_device else ""),
                f"{self.flop() / 1e12:.3g} TFLOP; plain PyTorch {6.0 * N * H * V / 1e12:.3g} TFLOP",
                f"{self.traffic() / 2**30:.3g} GiB moved outside the products",
                f"{self.memory() / 2**20:.0f} MiB beside gradients; plain PyTorch {2 * 4 * N * V / 2**20:.0f} MiB",
            ]
        )

    def to(self, device: torch.device | str) -> HeadPlan:
        """The same plan with its tensors on ``device``."""

        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.to(device, non_blocking=True)

        return replace(self, row=move(self.row), pair=move(self.pair), start=self.start.to(device, non_blocking=True))


def plan_policy_loss(
    fields: PolicyFields,
    objective: Objective,
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
    """Plan `linear_policy_loss` for a batch.

    Args:
        fields: of the batch, on any device; see the module's description for where to have them.
        num_rows, vocabulary, hidden_size: N, V and H.
        device: where the loss will run: it decides how large chunks are.
        row: row of each pair, on the device of ``fields``; default: one pair a row.
        frozen: the head takes no gradient.
        gradient: whether any gradient is wanted.
        gradient_share: share of rows that had a gradient in the last step (1 - the share clipped), for ``explain`` and
            for what a GPU does about the others.

    Raises:
        ValueError: a shape, dtype or device does not fit; without ``row`` there must be as many pairs as rows.
        IndexError: a row is out of range (CPU only; on a GPU the program stops).
    """
    check = Arguments("plan_policy_loss", "the fields", fields.adv_pos)
    M = len(fields.adv_pos)
    for name, size in (("num_rows", num_rows), ("vocabulary", vocabulary), ("hidden_size", hidden_size)):
        check.size(name, size, least=0 if name == "num_rows" else 1)
    check.number("gradient_share", gradient_share, least=0)
    if fields.paths is not None:
        fields.paths.check(check, M)
    if row is None:
        check.require(num_rows == M, f"{M} pairs for {num_rows} rows; give row= to pair them otherwise")
    else:
        check.integers("row", row, (M,), " like the fields")
        check.index("row", row, num_rows)
    C = chunk_rows(num_rows, vocabulary, torch.device(device))
    pair = objective.live(fields).nonzero().flatten()
    of_pair = pair if row is None else row[pair].long()
    if row is not None:
        of_pair, order = torch.sort(of_pair, stable=True)
        pair = pair[order]
    rows, rank, count = torch.unique_consecutive(of_pair, return_inverse=True, return_counts=True)
    start = torch.cat([count.new_zeros(1), count.cumsum(0)])

    schedule: Schedule = "logprob_only"
    row_cuts = even_cuts(len(rows), C)
    block_cuts: tuple[int, ...] = ()
    if gradient and objective.scope == "token":
        schedule = "fused_forward"
    elif gradient:
        aligned = _aligned_cuts(fields, pair, rank, C) if objective.scope == "path" else None
        if aligned is not None:
            schedule, (row_cuts, block_cuts) = "sequence_aligned", aligned
        else:
            schedule = "frozen_head" if frozen and not objective.needs_entropy else "two_phase"
    whole = len(rows) == num_rows
    return HeadPlan(
        schedule=schedule,
        row=None if whole else rows,
        pair=None if whole and row is None else pair,
        start=start,
        row_cuts=row_cuts,
        pair_cuts=tuple(start[list(row_cuts)].tolist()),
        block_cuts=block_cuts,
        given=(num_rows, M),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=gradient_share,
        count_on_device=torch.device(device).type == "cuda" and gradient_share < COUNT_BELOW,
    )


def plan_everything(num_rows: int, vocabulary: int, hidden_size: int, device: torch.device, frozen: bool) -> HeadPlan:
    """Every pair, one a row, for an objective of tokens: the plan that needs no look at the data."""
    cuts = even_cuts(num_rows, chunk_rows(num_rows, vocabulary, device))
    return HeadPlan(
        schedule="fused_forward",
        row=None,
        pair=None,
        start=torch.arange(num_rows + 1, device=device),
        row_cuts=cuts,
        pair_cuts=cuts,
        block_cuts=(),
        given=(num_rows, num_rows),
        head=(vocabulary, hidden_size),
        frozen=frozen,
        gradient_share=1.0,
    )


def even_cuts(rows: int, chunk: int) -> tuple[int, ...]:
    return (*range(0, rows, max(chunk, 1)), rows)


def _aligned_cuts(
    fields: PolicyFields,
    pair: Tensor,  # [P] live pairs, by row
    rank: Tensor,  # [P] which of the needed rows is theirs
    chunk: int,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Cuts of rows and of pairs such that no path crosses one and no chunk has more than ``chunk`` rows, if there are.

    A *block* is a shortest run of pairs that no path leaves: a sequence, or a tree.
    """
    if fields.paths is None or not len(pair):
        return None
    end = fields.paths.pair_end.long()
    inside = torch.arange(1, len(end), device=end.device)
    edge = torch.cat([inside.new_zeros(1), inside[end.cummax(0).values[:-1] <= inside], inside.new_tensor([len(end)])])
    block = torch.searchsorted(edge[1:], pair, right=True)
    first = torch.full((len(edge) - 1,), len(pair), device=pair.device).scatter_reduce(0, block, rank, "amin")
    last = torch.full_like(first, -1).scatter_reduce(0, block, rank, "amax")
    live = (last >= 0).nonzero().flatten()
    first, last = first[live], last[live]
    if (last - first).max() >= chunk or (first[1:] <= last[:-1]).any():
        return None
    row_cuts, block_cuts = [0], []
    opened = int(edge[live[0]])
    ends = edge[live + 1].tolist()
    begins = edge[live].tolist()
    for k, (top, bottom) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if bottom >= row_cuts[-1] + chunk:
            row_cuts.append(top)
            block_cuts += [opened, ends[k - 1]]
            opened = begins[k]
    return (*row_cuts, int(last[-1]) + 1), (*block_cuts, opened, ends[-1])
