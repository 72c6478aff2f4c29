"""Loss, metrics and all gradients of the head in one pass over chunks of rows, for known objectives.

A chunk is a GEMM into a tile of fp32 logits, the row statistics, the objectives on the chunk's targets (which give
value *and* derivatives), the gradient of the logits, and two GEMMs: the logits are formed once. On a CPU, rows that
have no gradient (all clipped) are left out of the last two GEMMs; on a GPU that would take a host synchronisation, so
it multiplies them. Rows on paths of several chunks are scored before all chunks and get their gradient after them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..forward_gradients import gradient_dtype
from ..linear_logprob import chunked
from ..linear_logprob.chunked import RowInputs, RowKernels
from ..linear_logprob.head import Head, HeadGradient
from ..linear_logprob.targets import Targets, sum_by_row
from .exponentials import Stored, add_gradient, fits
from .terms import TermEvaluator


class Cuts(NamedTuple):
    """Bounds of the chunks; see `plan.HeadPlan`."""

    row: list[int]
    target: list[int]
    path: list[int]


class Evaluator(Protocol):
    """A loss of the log-probs: what `TermEvaluator` says."""

    @property
    def needs_entropy(self) -> bool: ...

    def derivatives(
        self, targets: slice, paths: slice, logprob: Tensor, entropy: Tensor, add_paths: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...


class Inputs(NamedTuple):
    """The rows to score, and how their logits are scaled."""

    hidden: Tensor  # [R, H]
    head: Head
    targets: Targets  # P of them
    temperature: Tensor  # [R], in the accumulation dtype
    softcap: float


def one_pass(
    rows: RowKernels, inputs: Inputs, terms: Evaluator, cuts: Cuts, need_hidden: bool, need: HeadGradient
) -> tuple[Tensor, Tensor]:
    """Return the gradient of hidden ``[R, H]``, or ``[0]``, and log-prob and entropy of the targets ``[2, P]``.

    Gradients of the head are added to ``need``; ``terms`` adds up values and metrics. Where rows are shared by chunks
    it is a `TermEvaluator`.
    """
    hidden, head, targets, temperature, softcap = inputs
    sizes = [b - a for a, b in zip(cuts.row, cuts.row[1:], strict=False)]
    tile, d_tile = chunked.new_tiles(rows, head, max(sizes, default=0))
    scores, nothing = tile.new_empty(2, len(targets.target)), tile.new_empty(0)
    logprob = scores[0]
    d_hidden = hidden.new_zeros(hidden.shape if need_hidden else 0, dtype=gradient_dtype(hidden))
    by_exponentials = fits(rows, head, softcap, need, targets) and not terms.needs_entropy
    shared = SharedRows(rows, inputs, cuts) if cuts.row[0] else None
    if shared is not None:
        assert isinstance(terms, TermEvaluator)
        shared.record(terms, scores)
    for k, n in enumerate(sizes):
        c, here = slice(cuts.row[k], cuts.row[k + 1]), slice(cuts.target[k], cuts.target[k + 1])
        logits = head.logits(hidden[c], tile[:n])
        start = targets.start[c.start : c.stop + 1]
        logsumexp, correction, entropy, base = tile.new_empty(4, n)
        tile_rows = RowInputs(logits, head.bias, temperature[c], softcap, start, targets.target)
        if by_exponentials:
            rows.exponentials(tile_rows, logprob, logsumexp, correction, entropy, base, d_tile[:n])  # type: ignore[attr-defined]
        else:
            rows.statistics(tile_rows, logprob, logsumexp, correction, entropy, nothing)

        local = Targets(start - here.start, targets.target[here], None, targets.one_a_row)
        paths = slice(*cuts.path[2 * k : 2 * k + 2]) if cuts.path else here
        scores[1, here] = of_targets(entropy, local)
        a, b_of_target = terms.derivatives(here, paths, logprob[here], scores[1, here], add_paths=shared is None)
        of_hidden = d_hidden[c] if need_hidden else None
        if by_exponentials:
            stored = Stored(d_tile[:n], base, logsumexp, correction)
            add_gradient(head, need, hidden[c], local, temperature[c], a, stored, of_hidden)
        else:
            chunk = Inputs(hidden[c], head, local, temperature[c], softcap)
            _add_gradient_of_logits(
                rows, chunk, logits, (logsumexp, correction, entropy), a, b_of_target, d_tile[:n], of_hidden, need
            )
    if shared is not None:
        assert isinstance(terms, TermEvaluator)
        shared.add_gradient(terms, need_hidden, need, d_hidden)
    return d_hidden, scores


def _add_gradient_of_logits(
    rows: RowKernels,
    chunk: Inputs,
    logits: Tensor,  # [n, V]
    statistics: tuple[Tensor, Tensor, Tensor],  # logsumexp, correction, entropy [n]
    a: Tensor,  # [p]
    b_of_target: Tensor | None,  # [p]
    out: Tensor,  # [n, V], may be logits
    d_hidden: Tensor | None,  # [n, H]
    need: HeadGradient,
) -> None:
    """Write the gradient of the logits, add that of the head to ``need``, and fill ``d_hidden``."""
    x, head, local, temperature, softcap = chunk
    logsumexp, correction, entropy = statistics
    nothing = entropy[:0]
    b, constant = nothing, torch.zeros_like(entropy)
    if b_of_target is not None:
        b = sum_by_row(local, b_of_target)
        constant, _, _ = chunked.coefficients(entropy, nothing, constant, b, nothing)
    on_cpu = x.device.type == "cpu"
    alive = chunked.rows_with_gradient(local, a, constant, b, nothing) if on_cpu else None
    if alive is not None:
        alive = to_front(logits, alive)
        local, place = local.of_rows(alive)
        logits, x, out = logits[: len(alive)], x[alive], out[: len(alive)]
        a, constant, logsumexp, correction = a[place], constant[alive], logsumexp[alive], correction[alive]
        b = b[alive] if len(b) else b
        temperature = temperature[alive]
    tile_rows = RowInputs(logits, head.bias, temperature, softcap, local.start, local.target)
    rows.gradient(tile_rows, logsumexp, correction, a, constant, b, nothing, out)
    if d_hidden is not None:
        d_x = d_hidden if alive is None else torch.empty_like(x, dtype=d_hidden.dtype)
        head.to_hidden(out, d_x)
        if alive is not None:
            d_hidden.index_copy_(0, alive, d_x)
    need.add(out, x)


def to_front(tile: Tensor, rows: Tensor) -> Tensor:
    """Make ``rows [K]``, ascending, of ``tile [C, V]`` its first K; return which row each of these is now.

    Rows that are among the first K stay and the others fill the gaps, so that as few as possible are copied.
    """
    K = len(rows)
    order = torch.arange(K, device=rows.device)
    gaps = torch.ones_like(order, dtype=torch.bool).index_fill_(0, rows[rows < K], False).nonzero().flatten()
    tile[gaps] = tile[rows[rows >= K]]
    return order.index_copy_(0, gaps, rows[rows >= K])


class SharedRows:
    """The first rows, which are on paths of several chunks."""

    def __init__(self, rows: RowKernels, inputs: Inputs, cuts: Cuts) -> None:
        S, P = cuts.row[0], cuts.target[0]
        hidden, head, targets, temperature, softcap = inputs
        first = Targets(targets.start[: S + 1], targets.target[:P], None, targets.one_a_row)
        self.rows, self.inputs = rows, Inputs(hidden[:S], head, first, temperature[:S], softcap)
        self.logprob, self.logsumexp, self.correction, self.entropy, self.sum_p2, self.kept = chunked.forward(
            rows, *self.inputs, want_entropy=True, want_sum_p2=False, frozen_head=False
        )

    def record(self, terms: TermEvaluator, scores: Tensor) -> None:
        """Record their log-probs and entropies in ``terms`` and in ``scores [2, P]``."""
        terms.record(*self._scores())
        scores[:, : len(self.logprob)] = torch.stack(self._scores()[1:])

    def add_gradient(self, terms: TermEvaluator, need_hidden: bool, need: HeadGradient, d_hidden: Tensor) -> None:
        """Make their gradient, once ``terms`` has every other score; that of hidden goes into ``d_hidden [R, H]``."""
        here, logprob, entropy = self._scores()
        a, b = terms.derivatives(here, terms.everything, logprob, entropy)
        per_row = self.sum_p2 if b is None else sum_by_row(self.inputs.targets, b)  # sum_p2 is empty
        statistics = self.logsumexp, self.correction, self.entropy, self.sum_p2, self.kept
        zero = torch.zeros_like(self.logsumexp)
        gradient = chunked.backward(
            self.rows, *self.inputs, *statistics, a, zero, per_row, self.sum_p2, need_hidden, need,
            d_hidden.dtype,
        )  # fmt: skip
        if need_hidden:
            d_hidden[: len(gradient)] = gradient

    def _scores(self) -> tuple[slice, Tensor, Tensor]:
        return slice(0, len(self.logprob)), self.logprob, of_targets(self.entropy, self.inputs.targets)


def of_targets(entropy: Tensor, targets: Targets) -> Tensor:
    """Return the entropy of each target's row: ``[R] -> [P]``."""
    return entropy if targets.one_a_row else entropy[targets.row]
