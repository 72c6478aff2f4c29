"""The trees and batches of each rank, if several ranks share an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..data import checks
from ..data.tree import TokenTree
from .batch import TreeBatch
from .cost import CostModel
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
    load = np.zeros(ranks)
    members: list[list[int]] = [[] for _ in range(ranks)]
    costs = [cost.shared(tree) for tree in trees]
    for i in sorted(range(len(trees)), key=lambda i: (-costs[i], i)):
        lightest = int(load.argmin())
        members[lightest].append(i)
        load[lightest] += costs[i]
    of_ranks = []
    for of_rank in members:
        batches = pack(
            [trees[i] for i in of_rank],
            max_tokens=max_tokens,
            device=device,
            flat=flat,
            unshare=unshare,
            replay_routes=replay_routes,
        )
        of_ranks.append([replace(b, tree_index=tuple(of_rank[i] for i in b.tree_index)) for b in batches])
    return _filled(of_ranks)


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
        filler = _silent(min(every, key=lambda b: b.num_tokens))
        most = max(map(len, of_ranks))
        for batches in of_ranks:
            batches += [filler] * (most - len(batches))
    return of_ranks


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
