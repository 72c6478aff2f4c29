"""Loss, metrics and all gradients of the head in one pass over chunks of rows, for known objectives.

A chunk is a GEMM into a tile of fp32 logits, the row statistics, the objectives on the chunk's targets (which give
value *and* derivatives), the gradient of the logits, and two GEMMs: the logits are formed once. On a CPU rows that turn
out to have no gradient (clipped) leave before the last two GEMMs; a GPU would have to be waited for, and multiplies
them. Rows on paths of several chunks are scored before all chunks and get their gradient after them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..linear_logprob import chunked
from ..linear_logprob.chunked import RowInputs, RowKernels
from ..linear_logprob.head import Head, HeadGradient
from ..linear_logprob.targets import Targets, sum_by_row
from .judge import Judge


class Cuts(NamedTuple):
    """See `plan.HeadPlan`."""

    row: list[int]
    target: list[int]
    path: list[int]


class Inputs(NamedTuple):
    """What is scored, and how."""

    hidden: Tensor  # [R, H]
    head: Head
    targets: Targets  # P of them
    temperature: Tensor  # [R], in the accumulation dtype
    softcap: float


def one_pass(
    rows: RowKernels, given: Inputs, judge: Judge, cuts: Cuts, need_hidden: bool, need: HeadGradient
) -> tuple[Tensor, Tensor]:
    """Gradient of hidden ``[R, H]``, or ``[0]``, and log-prob and entropy of the targets ``[2, P]``.

    Gradients of the head are added to ``need``, the loss to ``judge``.
    """
    hidden, head, targets, temperature, softcap = given
    sizes = [b - a for a, b in zip(cuts.row, cuts.row[1:], strict=False)]
    tile, d_tile = chunked.new_tiles(rows, head, max(sizes, default=0))
    scores, nothing = tile.new_empty(2, len(targets.target)), tile.new_empty(0)
    logprob = scores[0]
    d_hidden = torch.zeros_like(hidden) if need_hidden else hidden.new_empty(0)
    shared = SharedRows(rows, given, cuts) if cuts.row[0] else None
    if shared is not None:
        shared.know(judge, scores)
    for k, n in enumerate(sizes):
        c, own = slice(cuts.row[k], cuts.row[k + 1]), slice(cuts.target[k], cuts.target[k + 1])
        logits = head.logits(hidden[c], tile[:n])
        start = targets.start[c.start : c.stop + 1]
        logsumexp, correction, entropy = tile.new_empty(3, n)
        inputs = RowInputs(logits, head.bias, temperature[c], softcap, start, targets.target)
        rows.statistics(inputs, logprob, logsumexp, correction, entropy, nothing)

        local = Targets(start - own.start, targets.target[own], None, targets.one_a_row)
        paths = slice(*cuts.path[2 * k : 2 * k + 2]) if cuts.path else own
        scores[1, own] = of_targets(entropy, local)
        a, of_entropy = judge.derivatives(own, paths, logprob[own], scores[1, own], add_paths=shared is None)
        b, constant = nothing, torch.zeros_like(entropy)
        if of_entropy is not None:
            b = sum_by_row(local, of_entropy)
            constant, _, _ = chunked.coefficients(entropy, nothing, constant, b, nothing)

        counted = hidden.device.type == "cpu"
        alive = chunked.rows_with_gradient(local, a, constant, b, nothing) if counted else None
        x, of_row, out = hidden[c], temperature[c], d_tile[:n]
        if alive is not None:
            alive = to_front(logits, alive)
            local, of_alive = local.of_rows(alive)
            logits, x, out = logits[: len(alive)], x[alive], out[: len(alive)]
            a, constant, logsumexp, correction = a[of_alive], constant[alive], logsumexp[alive], correction[alive]
            b = b[alive] if len(b) else b
            of_row = of_row[alive]
        inputs = RowInputs(logits, head.bias, of_row, softcap, local.start, local.target)
        rows.gradient(inputs, logsumexp, correction, a, constant, b, nothing, out)
        if need_hidden:
            d_x = d_hidden[c] if alive is None else torch.empty_like(x)
            head.to_hidden(out, d_x)
            if alive is not None:
                d_hidden[c].index_copy_(0, alive, d_x)
        need.add(out, x)
    if shared is not None:
        shared.learn(judge, need_hidden, need, d_hidden)
    return d_hidden, scores


def to_front(tile: Tensor, rows: Tensor) -> Tensor:
    """Make ``rows [K]``, ascending, of ``tile [C, V]`` its first K; returns which row each of these is now.

    Rows that are among the first K stay, the others fill the gaps: as few as can be are copied, into memory in use.
    """
    K = len(rows)
    order = torch.arange(K, device=rows.device)
    gaps = torch.ones_like(order, dtype=torch.bool).index_fill_(0, rows[rows < K], False).nonzero().flatten()
    tile[gaps] = tile[rows[rows >= K]]
    return order.index_copy_(0, gaps, rows[rows >= K])


class SharedRows:
    """The first rows, which are on paths of several chunks."""

    def __init__(self, rows: RowKernels, given: Inputs, cuts: Cuts) -> None:
        S, P = cuts.row[0], cuts.target[0]
        hidden, head, targets, temperature, softcap = given
        of = Targets(targets.start[: S + 1], targets.target[:P], None, targets.one_a_row)
        self.rows, self.given = rows, Inputs(hidden[:S], head, of, temperature[:S], softcap)
        self.logprob, self.logsumexp, self.correction, self.entropy, self.sum_p2, self.kept = chunked.forward(
            rows, *self.given, want_entropy=True, want_sum_p2=False, frozen_head=False
        )

    def know(self, judge: Judge, scores: Tensor) -> None:
        """Tell ``judge`` their log-probs and entropies, and put these into ``scores [2, P]``."""
        judge.know(*self._known())
        scores[:, : len(self.logprob)] = torch.stack(self._known()[1:])

    def learn(self, judge: Judge, need_hidden: bool, need: HeadGradient, d_hidden: Tensor) -> None:
        """Their gradient, once every other target is known to ``judge``; that of hidden into ``d_hidden [R, H]``."""
        own, logprob, entropy = self._known()
        a, b = judge.derivatives(own, judge.everything, logprob, entropy)
        per_row = self.sum_p2 if b is None else sum_by_row(self.given.targets, b)  # which is empty
        found = self.logsumexp, self.correction, self.entropy, self.sum_p2, self.kept
        zero = torch.zeros_like(self.logsumexp)
        gradient = chunked.backward(self.rows, *self.given, *found, a, zero, per_row, self.sum_p2, need_hidden, need)
        if need_hidden:
            d_hidden[: len(gradient)] = gradient

    def _known(self) -> tuple[slice, Tensor, Tensor]:
        return slice(0, len(self.logprob)), self.logprob, of_targets(self.entropy, self.given.targets)


def of_targets(entropy: Tensor, targets: Targets) -> Tensor:
    """``[R] -> [P]``: what each target's row has."""
    return entropy if targets.one_a_row else entropy[targets.row]
