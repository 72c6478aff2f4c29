"""The trees and batches of each rank, if several ranks share an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data import checks
from ..data.tree import TokenTree
from .batch import TreeBatch
from .cost import CostModel, Work
from .pack import pack


def distribute(
    trees: Sequence[TokenTree],
    ranks: int,
    cost: CostModel,
    *,
    max_tokens: int,
    flat: bool = False,
    unshare: CostModel | None = None,
    replay_routes: bool = False,
    device: torch.device | str | None = None,
) -> list[list[TreeBatch]]:
    """Batches for every rank: about equal work, the same number of batches, and each tree on one rank.

    Trees are assigned in order of cost, each to the rank with the least work. A rank with fewer batches gets further
    ones that stand for no tree, because ranks synchronise in every batch (FSDP); so does a rank without a tree.
    ``tree_index`` counts in ``trees``.

    Args:
        max_tokens, flat, unshare, replay_routes, device: as for :func:`pack`.

    Raises:
        ValueError: a tree does not fit; see :func:`pack`.
    """
    checks.size("ranks", ranks)
    checks.all_of("trees", trees, TokenTree)
    options: dict[str, Any] = {
        "max_tokens": max_tokens, "device": device, "flat": flat, "unshare": unshare, "replay_routes": replay_routes,
    }  # fmt: skip
    members = assigned([cost.shared(tree) for tree in trees], ranks)
    return _filled([_packed(trees, of_rank, options) for of_rank in members])


class Share(NamedTuple):
    """A rank's part of a batch; see `own_share`.

    Attributes:
        batches: its batches, as many as every rank has.
        real: number of batches of all ranks that stand for a tree.
        whole: no tree of any rank is divided.
        work: the forward passes of all ranks.
    """

    batches: list[TreeBatch]
    real: int
    whole: bool
    work: Work


def own_share(
    trees: Sequence[TokenTree],
    rank: int,
    ranks: int,
    cost: CostModel,
    gather: Callable[[Any], list[Any]],
    **options: Any,
) -> Share:
    """Batches for this rank of the trees that :func:`distribute` gives it; no rank reads the tokens of all trees.

    Each rank computes the cost of every ``ranks``-th tree and packs its own.

    Args:
        gather: returns a value of every rank; all ranks call it as often.
        options: of :func:`pack`. Raises as that does.
    """
    costs = {i: cost.shared(trees[i]) for i in range(rank, len(trees), ranks)}
    for of_rank in gather(costs):
        costs |= of_rank
    batches = _packed(trees, assigned([costs[i] for i in range(len(trees))], ranks)[rank], options)
    counts: list[int] = gather(len(batches))
    real = batches
    if lacking := max(counts) - len(batches):
        spare = batches or _packed(trees, [min(costs, key=lambda i: (costs[i], i))], options)
        batches = batches + [_filler(spare)] * lacking
    parts = [part for b in real for part in zip(b.tree_index, b.leaf_index, strict=True)]
    whole = all(len(leaves) == trees[i].num_leaves for i, leaves in parts)
    told = gather((whole, Work.of(batches)))
    return Share(batches, sum(counts), all(w for w, _ in told), sum((work for _, work in told), Work()))


def assigned(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return for each rank the places of its trees: in order of cost, each for the rank with the least work."""
    load = np.zeros(ranks)
    members: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = int(load.argmin())
        members[lightest].append(i)
        load[lightest] += costs[i]
    return members


def _packed(trees: Sequence[TokenTree], members: Sequence[int], options: Mapping[str, Any]) -> list[TreeBatch]:
    batches = pack([trees[i] for i in members], **options)
    return [replace(b, tree_index=tuple(members[i] for i in b.tree_index)) for b in batches]


def deal(trees: Sequence[TokenTree], ranks: int, **options: Any) -> list[list[TreeBatch]]:
    """Batches for every rank: of those of one process each takes one in turn, whatever it costs.

    Args:
        options: of :func:`pack`. Raises as that does.
    """
    batches = pack(trees, **options)
    return _filled([batches[rank::ranks] for rank in range(ranks)])


def _filled(of_ranks: list[list[TreeBatch]]) -> list[list[TreeBatch]]:
    """Give ranks that have fewer batches some that stand for no tree."""
    every = [batch for batches in of_ranks for batch in batches]
    if every:
        most = max(map(len, of_ranks))
        for batches in of_ranks:
            batches += [_filler(every)] * (most - len(batches))
    return of_ranks


def _filler(batches: Sequence[TreeBatch]) -> TreeBatch:
    return _silent(min(batches, key=lambda b: b.num_tokens))


def _silent(batch: TreeBatch) -> TreeBatch:
    """``batch`` without any token in the loss, and of no tree: nothing counts it or is scored by it."""
    chosen = {name: torch.zeros_like(v) for name, v in batch.columns.items() if name.startswith("select_")}
    return replace(
        batch,
        trees=(),
        tree_index=(),
        leaf_index=(),
        columns=batch.columns | chosen,
        loss_mask=torch.zeros_like(batch.loss_mask),
        leaf_length=torch.zeros_like(batch.leaf_length),
        leaf_advantage=torch.zeros_like(batch.leaf_advantage),
        path_advantage=None if batch.path_advantage is None else torch.zeros_like(batch.path_advantage),
        mixed=False,
    )
