"""A tree without the ends of responses: what a loss does not read need not be computed."""

from __future__ import annotations

import numpy as np

from .columns import Array
from .tree import TokenTree


def cut(tree: TokenTree, extent: Array) -> TokenTree | None:
    """Return ``tree`` without the tokens of each response after its first ``extent``, unless another response has them.

    A response whose end lies inside a node that another one needs further keeps as much of that node. Prompts stay
    whole, and of a tree with pictures whole responses alone are left out, as a picture's rows belong together.

    Args:
        tree: a tree of ``L`` leaves.
        extent: ``[L]`` tokens of each response that are needed, at most its length; 0 leaves the response out.

    Returns:
        The tree, ``tree`` itself if nothing is left out, or None if no response is needed.
    """
    needed = extent > 0
    if tree.pictures:
        extent = np.where(needed, tree.response_length, 0)
    if (extent == tree.response_length).all() and needed.all():
        return tree
    part = tree if needed.all() else tree.without_leaves(~needed)
    if part is None:
        return None
    return _shortened(part, (part.leaf_prompt + extent[needed]).astype(np.int64))


def _shortened(tree: TokenTree, end: Array) -> TokenTree:  # [L] tokens of each path that are needed
    longest = _longest_below(tree, end)
    length = np.clip(longest - tree.node_position, 0, tree.length)
    length[0] = tree.length[0]
    if (length == tree.length).all():
        return tree
    leaf_node = tree.leaf_node.copy()
    while (above := tree.node_position[leaf_node] >= end).any():
        leaf_node[above] = tree.parent[leaf_node[above]]
    node_end = tree.node_position + length
    kept = node_end[leaf_node] - tree.leaf_prompt  # of each response
    inside = np.arange(tree.num_tokens) - np.repeat(tree.start, tree.length)
    keep_node = length > 0
    renumber = np.cumsum(keep_node) - 1
    first = np.cumsum(tree.response_length) - tree.response_length
    of_path = np.arange(int(tree.response_length.sum())) - np.repeat(first, tree.response_length)
    keep = {
        "token": inside < np.repeat(length, tree.length),
        "node": keep_node,
        "leaf": np.ones(tree.num_leaves, bool),
        "path": of_path < np.repeat(kept, tree.response_length),
    }
    parent = np.where(tree.parent[keep_node] < 0, -1, renumber[tree.parent[keep_node]]).astype(np.int32)
    return tree._part(keep, parent, length[keep_node], renumber[leaf_node].astype(np.int32))


def _longest_below(tree: TokenTree, end: Array) -> Array:  # [L] -> [K]
    """Return the largest of the leaves' values below each node."""
    in_order = np.append(end[tree.leaf_order], 0)  # the bound after the last leaf is an index too
    bounds = np.stack([tree.first_leaf, tree.last_leaf + 1], axis=1).ravel()
    return np.maximum.reduceat(in_order, bounds)[::2]
