"""Who computes which trees, where several ranks share an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from . import checks
from .batch import TreeBatch
from .cost import CostModel
from .pack import pack
from .tree import TokenTree


def distribute(
    trees: Sequence[TokenTree],
    ranks: int,
    cost: CostModel,
    *,
    max_tokens: int,
    device: torch.device | str | None = None,
) -> list[list[TreeBatch]]:
    """Batches for every rank: about equal work, equally many, each tree whole on one rank as long as it fits a batch.

    The costliest tree goes first, to the rank with the least to do. A rank short of a batch gets one that teaches
    nothing, so that ranks which meet in every batch (FSDP) stay together. ``tree_index`` counts in ``trees``.

    Raises:
        ValueError: there are fewer trees than ranks, or a tree does not fit; see :func:`pack`.
    """
    checks.size("ranks", ranks)
    checks.all_of("trees", trees, TokenTree)
    if len(trees) < ranks:
        raise ValueError(f"{len(trees)} trees cannot be distributed over {ranks} ranks; give at least one tree a rank.")
    load = np.zeros(ranks)
    members: list[list[int]] = [[] for _ in range(ranks)]
    costs = [cost.shared(tree) for tree in trees]
    for i in sorted(range(len(trees)), key=lambda i: (-costs[i], i)):
        lightest = int(load.argmin())
        members[lightest].append(i)
        load[lightest] += costs[i]
    of_ranks = []
    for mine in members:
        batches = pack([trees[i] for i in mine], max_tokens=max_tokens, device=device)
        of_ranks.append([replace(b, tree_index=tuple(mine[i] for i in b.tree_index)) for b in batches])
    most = max(map(len, of_ranks))
    for batches in of_ranks:
        smallest = min(batches, key=lambda b: b.num_tokens)
        batches += [_silent(smallest) for _ in range(most - len(batches))]
    return of_ranks


def _silent(batch: TreeBatch) -> TreeBatch:
    """``batch``, of which nothing is learned."""
    return replace(
        batch,
        loss_mask=torch.zeros_like(batch.loss_mask),
        leaf_length=torch.zeros_like(batch.leaf_length),
        leaf_advantage=torch.zeros_like(batch.leaf_advantage),
        path_advantage=None if batch.path_advantage is None else torch.zeros_like(batch.path_advantage),
        mixed=False,
    )
