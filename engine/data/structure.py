"""The arrays that make nodes a tree: depth-first order, positions, parents, ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .columns import COLUMNS, Array


@dataclass(frozen=True)
class Structure:
    """Nodes in depth-first preorder and what follows from it; the fields are those of `TokenTree`."""

    parent: Array  # [K]
    start: Array  # [K]
    length: Array  # [K]
    first_leaf: Array  # [K]
    last_leaf: Array  # [K]
    position: Array  # [T]
    parent_row: Array  # [T]
    subtree_end: Array  # [T]
    leaf_node: Array  # [L]
    leaf_order: Array  # [L]
    node_source: Array  # [K], the node's number before it was put in order
    row_source: Array  # [T], the token's place before

    def ordered(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """``columns`` of nodes given in any order, in this one; those of leaves keep theirs."""
        source = {"token": self.row_source, "node": self.node_source}
        return {
            name: values[source[per]] if (per := COLUMNS[name].per) in source else values
            for name, values in columns.items()
        }


def depth_first(parent: Array, length: Array, leaf_node: Array) -> Structure:
    """Put nodes into depth-first preorder, children in the order of their numbers.

    Args:
        parent: ``[K]``, -1 for node 0; parents come before their children.
        length: ``[K]`` tokens of each node.
        leaf_node: ``[L]``, the node at which each leaf ends.

    Raises:
        ValueError: a childless node is no leaf's.
    """
    count = len(parent)
    above = parent.tolist()
    children: list[list[int]] = [[] for _ in range(count)]
    for node in range(count - 1, 0, -1):  # reversed, so that the stack pops the first child first
        children[above[node]].append(node)
    preorder: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        preorder.append(node)
        stack.extend(children[node])
    order = np.array(preorder)
    rank = np.empty(count, np.int32)
    rank[order] = np.arange(count, dtype=np.int32)

    begin = np.concatenate([[0], np.cumsum(length)[:-1]])
    length = length[order].astype(np.int32)
    start = (np.cumsum(length) - length).astype(np.int32)
    total = int(length.sum())
    within = np.arange(total) - np.repeat(start, length)
    parent = np.where(order == 0, -1, rank[parent[order]]).astype(np.int32)

    above, tokens = parent.tolist(), length.tolist()
    sizes, positions = [1] * count, [0] * count  # nodes in each subtree; position of each node's first token
    for node in range(1, count):
        positions[node] = positions[above[node]] + tokens[above[node]]
    for node in range(count - 1, 0, -1):
        sizes[above[node]] += sizes[node]
    size, node_position = np.array(sizes), np.array(positions)
    node_end = np.append(start, total)[np.arange(count) + size]

    leaf_node = rank[leaf_node]
    leaf_order = np.argsort(leaf_node, kind="stable").astype(np.int32)
    in_order = leaf_node[leaf_order]
    first_leaf = np.searchsorted(in_order, np.arange(count)).astype(np.int32)
    last_leaf = (np.searchsorted(in_order, np.arange(count) + size) - 1).astype(np.int32)
    if (last_leaf < first_leaf).any():
        raise ValueError("A childless node must be the end of a leaf; name it in leaf_nodes or leave it out.")

    parent_last = np.where(parent < 0, -1, (start + length - 1)[parent])
    return Structure(
        parent=parent,
        start=start,
        length=length,
        first_leaf=first_leaf,
        last_leaf=last_leaf,
        position=(np.repeat(node_position, length) + within).astype(np.int32),
        parent_row=np.where(within == 0, np.repeat(parent_last, length), np.arange(total) - 1).astype(np.int32),
        subtree_end=np.repeat(node_end, length).astype(np.int32),
        leaf_node=leaf_node,
        leaf_order=leaf_order,
        node_source=order,
        row_source=np.repeat(begin[order], length) + within,
    )
