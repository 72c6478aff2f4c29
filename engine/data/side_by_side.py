"""Several trees as one with several roots, so that what is read of them is read at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import Array
from .tree import TokenTree


def side_by_side(trees: Sequence[TokenTree]) -> TokenTree:
    """The trees' rows, nodes and leaves one after the other; rewards and meta are left out.

    What holds of a tree holds of it, but `prompt_length`: a prompt is every node without a parent.
    """
    nodes, rows, leaves = (
        np.cumsum([0, *(getattr(tree, of) for tree in trees)]) for of in ("num_nodes", "num_tokens", "num_leaves")
    )

    def join(name: str, first: Array | None = None) -> Array:
        """The values of all; those that are numbers of rows, nodes or leaves count on from each tree's ``first``."""
        values = [getattr(tree, name) for tree in trees]
        joined = np.concatenate(values)
        return joined if first is None else joined + np.repeat(first[:-1].astype(np.int32), list(map(len, values)))

    parent = join("parent", nodes)
    parent[nodes[:-1]] = -1
    parent_row = join("parent_row", rows)
    parent_row[rows[:-1]] = -1
    return TokenTree(
        parent=parent,
        start=join("start", rows),
        length=join("length"),
        first_leaf=join("first_leaf", leaves),
        last_leaf=join("last_leaf", leaves),
        token_id=join("token_id"),
        position=join("position"),
        parent_row=parent_row,
        subtree_end=join("subtree_end", rows),
        leaf_node=join("leaf_node", nodes),
        leaf_order=join("leaf_order", leaves),
        leaf_prompt=join("leaf_prompt"),
        columns={name: join(name) for name in dict.fromkeys(name for tree in trees for name in tree.columns)},
    )
