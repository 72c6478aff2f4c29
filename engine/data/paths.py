"""Values of every response token of every leaf: the pairs of a leaf and a token on its path.

A shared token has a pair for each of its leaves, so the credit of one response may differ from that of another there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import Array
from .concat import side_by_side
from .tree import TokenTree

CREDIT = ("path_advantage", "token_advantage", "node_advantage")
"""Columns of credit finer than a leaf, the finest first."""


def has_credit(tree: TokenTree) -> bool:
    """Tell if the tree has credit finer than a leaf."""
    return any(name in tree.names for name in CREDIT)


def path_credit(tree: TokenTree) -> Array:  # [P] float64
    """Return the finest credit the tree carries, for every response token of every leaf."""
    credit = np.repeat(tree.advantage.astype(np.float64), tree.response_length)
    if "path_advantage" in tree.columns:
        credit = tree.path_advantage
    elif "token_advantage" in tree.columns:
        credit = tree.token_advantage[tree.path_tokens]
    elif "node_advantage" in tree.columns:
        credit = np.repeat(tree.node_advantage, tree.length)[tree.path_tokens]
    return credit.astype(np.float64)


def last_marked(tree: TokenTree, marked: Array) -> Array:  # [P] bool -> [L] int64
    """Return the place of each response's last marked token, counted from 1; 0 if none is marked."""
    length = tree.response_length.astype(np.int64)
    first = np.cumsum(length) - length
    place = np.where(marked, np.arange(len(marked)) - np.repeat(first, length) + 1, 0)
    last = np.zeros(tree.num_leaves, np.int64)
    sampled = length > 0
    last[sampled] = np.maximum.reduceat(place, first[sampled]) if sampled.any() else 0
    return last


def response_pairs(trees: Sequence[TokenTree], all_of: TokenTree | None = None) -> dict[str, Array]:
    """Return target and leaf of every response token of every leaf, leaves in depth-first order, tree after tree.

    Args:
        all_of: the trees side by side, if they are at hand.

    Returns:
        ``path_target [P]``, the token's place among the targets of a batch of ``trees``; ``path_leaf [P]``, the leaf's
        rank; and ``path_advantage [P]`` if a tree has credit finer than a leaf.
    """
    all_of = side_by_side(trees) if all_of is None else all_of
    response = all_of.parent[np.repeat(np.arange(all_of.num_nodes), all_of.length)] >= 0
    before = np.append(0, np.cumsum(response))  # targets before each token
    in_order = depth_first(all_of)
    rank = np.empty(all_of.num_leaves, np.int64)
    rank[all_of.leaf_order] = np.arange(all_of.num_leaves)
    pairs = {
        "path_target": before[all_of.path_tokens[in_order]],
        "path_leaf": np.repeat(rank, all_of.response_length)[in_order],
    }
    if any(map(has_credit, trees)):
        pairs["path_advantage"] = np.concatenate([path_credit(tree) for tree in trees])[in_order]
    return pairs


def depth_first(tree: TokenTree) -> Array:  # [P]
    """Return the indices that put the values of a ``path`` column into depth-first order of leaves."""
    first, length = np.cumsum(tree.response_length) - tree.response_length, tree.response_length[tree.leaf_order]
    return np.repeat(first[tree.leaf_order] - np.cumsum(length) + length, length) + np.arange(length.sum())
