"""Chunks of rows for losses of whole paths.

A row lies *across* a cut of the caller's targets when it is on paths on both sides of it: it has targets on both sides,
or one before the cut in whose subtree the cut is. Rows across some cut are shared: they are scored before all chunks,
so that a chunk has the log-probs of every path it holds, and get their gradient after all chunks. All other rows belong
to one chunk. Any cut is exact; a good one has few rows across it: it lies between trees, or between the leaves of a
group that share only their prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .terms import AnyTerm, Term


class Alignment(NamedTuple):
    row: Tensor  # [R] int64: the needed rows in order of use, shared ones first, the others chunk by chunk
    in_order: bool  # row is 0 .. R - 1
    shared: int
    row_cuts: tuple[int, ...]  # of these rows, from `shared` on
    path_cuts: tuple[int, ...]  # (first, last) of each chunk: the caller's targets of the trees it is in


def align(
    terms: Sequence[AnyTerm],
    place: Tensor,  # [P] int64: targets needed, in the caller's order, by row
    rank: Tensor,  # [P] int64: place of their row among the R needed rows
    chunk: int,
) -> Alignment | None:
    """Return chunks of at most ``chunk`` rows, or None if a term of paths has no `PathIndex`."""
    indices = [t.fields.paths for t in terms if isinstance(t, Term) and t.objective.scope == "path"]
    if not len(place) or any(paths is None for paths in indices):
        return None
    end = functools.reduce(torch.maximum, [paths.target_end.long() for paths in indices if paths is not None])
    M, R, device = len(end), int(rank.max()) + 1, place.device
    low, last, high = _least(rank, place, R), _most(rank, place, R), _most(rank, end[place], R)

    order = low.argsort()
    cuts = _cuts(low[order], _across(low, high, M), chunk)
    after = torch.searchsorted(cuts, low, right=True)  # the chunk of a row; the cut after it is the first above low
    shared = cuts[after] < high
    single = order[~shared[order]]  # rows of one chunk
    row = torch.cat([shared.nonzero().flatten(), single])
    sizes = torch.bincount(after[single], minlength=len(cuts))
    used = sizes.nonzero().flatten()
    S = R - len(single)
    bounds = [S, *(S + sizes[used].cumsum(0)).tolist()]

    inside = torch.arange(1, M, device=device)
    edge = torch.cat([inside.new_zeros(1), inside[end.cummax(0).values[:-1] <= inside], inside.new_tensor([M])])
    first, final = (f(after[single], bound[single], len(cuts))[used] for f, bound in ((_least, low), (_most, last)))
    begins = edge[torch.searchsorted(edge, first, right=True) - 1]
    ends = edge[torch.searchsorted(edge, final, right=True)]
    in_order = bool((row == torch.arange(R, device=device)).all())
    return Alignment(row, in_order, S, tuple(bounds), tuple(torch.stack([begins, ends], 1).flatten().tolist()))


def _least(index: Tensor, values: Tensor, size: int) -> Tensor:  # [size]
    return torch.full((size,), torch.iinfo(torch.int64).max, device=index.device).scatter_reduce(
        0, index, values, "amin"
    )


def _most(index: Tensor, values: Tensor, size: int) -> Tensor:  # [size]
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_reduce(0, index, values, "amax")


def _across(low: Tensor, high: Tensor, M: int) -> Tensor:
    """Return ``[M]``: how many rows lie across a cut before each of the caller's targets: low < cut < high."""
    one, steps = torch.ones_like(low), torch.zeros(M + 2, dtype=torch.int64, device=low.device)
    return steps.index_add_(0, low + 1, one).index_add_(0, torch.maximum(high, low + 1), -one).cumsum(0)[:M]


def _cuts(low: Tensor, across: Tensor, chunk: int) -> Tensor:
    """Return cuts of the caller's targets, each before a row's first, and a last one after all.

    Greedy: the next chunk is the one with the least cost a row. A chunk costs a quarter of the most rows it can have
    (reading and writing the gradient of the head), and a row across its cut costs as much as a row.
    """
    R, begin, cuts = len(low), 0, []
    cost = across[low] + chunk / 4  # of a chunk that ends before each row
    sizes = torch.arange(1, chunk + 1, device=low.device)
    while R - begin > chunk:
        a_row = cost[begin + 1 : begin + 1 + chunk] / sizes
        begin += chunk - int(a_row.flip(0).argmin())  # the largest of equals
        cuts.append(int(low[begin]))
    return torch.tensor([*cuts, 2 * len(across) + 1], device=low.device)
