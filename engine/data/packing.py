"""Which trees, parts of trees or leaves go into a batch together, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from . import checks
from .assembly import assemble
from .batch import TreeBatch
from .columns import Array
from .cost import CostModel
from .pieces import cut
from .tree import TokenTree

WORTH_SHARING = 1.1
"""FLOP of the flat batch over those of the tree, from which on a tree is computed as one."""


def pack(
    trees: Sequence[TokenTree],
    *,
    max_tokens: int,
    device: torch.device | str | None = None,
    in_pieces: bool = False,
    flat: bool = False,
    unshare: CostModel | None = None,
) -> list[TreeBatch]:
    """Pack trees into batches of at most ``max_tokens`` unique tokens.

    Trees stay whole and go to the fullest batch they fit (best-fit decreasing; deterministic). A larger tree is split
    by its leaves, each part repeating the ancestors it needs; losses and gradients of the parts add up to the whole's.
    With ``in_pieces`` it becomes a batch of its own, to be computed in pieces of ``max_tokens`` that repeat nothing
    (:func:`rolltree.engine.backward`, :func:`batch_logprob`); a single path may then be longer than the budget.
    With ``flat`` nothing is shared: every leaf is a sequence of its own, and the model computes ordinary padded batches
    of at most ``max_tokens`` places, without any tree attention. It is for models whose layers no tree mask fits.
    With ``unshare`` trees that save less than a tenth of the flat batch's FLOP are packed as plain sequences, apart
    from the others: a kernel made for those may be faster by more than that.

    Raises:
        ValueError: one root-to-leaf path alone exceeds ``max_tokens``, and ``in_pieces`` is not set; or ``max_tokens``
            is below 1.
    """
    checks.all_of("trees", trees, TokenTree)
    checks.size("max_tokens", max_tokens)
    if flat:
        return _pack_flat(trees, max_tokens, device)
    parts: list[tuple[int, TokenTree, Array]] = []
    oversized: list[TreeBatch] = []
    for index, tree in enumerate(trees):
        if in_pieces and tree.num_tokens > max_tokens:
            whole = assemble([(index, tree, np.arange(tree.num_leaves))], device)
            oversized.append(replace(whole, pieces=cut(tree, max_tokens, device)))
        else:
            parts.extend((index, part, leaves) for part, leaves in _split(tree, max_tokens, index))
    plain: list[tuple[int, TokenTree, Array]] = []
    if unshare is not None:
        losing = [unshare.flat(part) < WORTH_SHARING * unshare.shared(part) for _, part, _ in parts]
        for (index, part, leaves), loses in zip(parts, losing, strict=True):
            if loses:
                plain += [(index, part.chain(i), leaves[i : i + 1]) for i in range(part.num_leaves)]
        parts = [part for part, loses in zip(parts, losing, strict=True) if not loses]
    return oversized + _best_fit(parts, max_tokens, device) + _best_fit(plain, max_tokens, device)


def _best_fit(
    parts: list[tuple[int, TokenTree, Array]], max_tokens: int, device: torch.device | str | None
) -> list[TreeBatch]:
    order = sorted(range(len(parts)), key=lambda i: (-parts[i][1].num_tokens, i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        size = parts[i][1].num_tokens
        fitting = [b for b in range(len(bins)) if room[b] >= size]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
        else:
            bins.append([])
            room.append(max_tokens)
            best = len(bins) - 1
        bins[best].append(i)
        room[best] -= size
    return [assemble([parts[i] for i in sorted(members)], device) for members in bins]


def _pack_flat(trees: Sequence[TokenTree], max_tokens: int, device: torch.device | str | None) -> list[TreeBatch]:
    """Every leaf alone, the longest first, as many together as fit when padded to the first."""
    leaves = [
        (index, leaf, int(length)) for index, tree in enumerate(trees) for leaf, length in enumerate(tree.path_length)
    ]
    leaves.sort(key=lambda known: -known[2])
    batches: list[TreeBatch] = []
    while leaves:
        index, leaf, longest = leaves[0]
        if longest > max_tokens:
            raise ValueError(_too_long(leaf, index, longest, max_tokens))
        taken, leaves = leaves[: max_tokens // longest], leaves[max_tokens // longest :]
        batch = assemble([(i, trees[i].chain(j), np.array([j])) for i, j, _ in taken], device)
        lengths = np.array([length for _, _, length in taken])
        place = np.arange(lengths.sum()) + np.repeat(
            np.arange(len(taken)) * longest - (np.cumsum(lengths) - lengths), lengths
        )
        batches.append(replace(batch, padded=(len(taken), longest), place=torch.from_numpy(place).to(device)))
    return batches


def _too_long(leaf: int, tree: int, length: int, max_tokens: int) -> str:
    return (
        f"Leaf {leaf} of tree {tree} is {length} tokens long with its prompt, over the budget of "
        f"max_tokens={max_tokens}; raise max_tokens or shorten prompts and responses."
    )


def _split(tree: TokenTree, max_tokens: int, index: int) -> list[tuple[TokenTree, Array]]:
    """Parts of ``tree`` within the budget, each with the leaf indices it holds."""
    everything = np.arange(tree.num_leaves)
    if tree.num_tokens <= max_tokens:
        return [(tree, everything)]
    path = tree.path_length
    if path.max() > max_tokens:
        worst = int(path.argmax())
        raise ValueError(_too_long(worst, index, int(path[worst]), max_tokens))
    # depth-first, a leaf adds the tokens below its deepest ancestor that an earlier leaf of the part also has
    node_end = (tree.node_position + tree.length).astype(np.int64)
    groups: list[list[int]] = []
    used, size = np.zeros(tree.num_nodes, bool), max_tokens + 1
    for leaf in tree.leaf_order.tolist():
        new, node = [], int(tree.leaf_node[leaf])
        while node >= 0 and not used[node]:
            new.append(node)
            node = int(tree.parent[node])
        added = int(tree.length[new].sum())
        if size + added > max_tokens:
            groups.append([])
            used[:] = False
            size, new, node = 0, [], int(tree.leaf_node[leaf])
            while node >= 0:
                new.append(node)
                node = int(tree.parent[node])
            added = int(node_end[tree.leaf_node[leaf]])
        groups[-1].append(leaf)
        used[new] = True
        size += added
    out = []
    for group in groups:
        keep = np.isin(everything, group)
        part = tree.without_leaves(~keep)
        assert part is not None
        out.append((part, everything[keep]))
    return out
