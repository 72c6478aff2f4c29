"""The arrays that make nodes a tree: depth-first order, positions, parents, ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np

from .columns import COLUMNS, Array


class Structure(NamedTuple):
    """Nodes in depth-first preorder and what follows from it; int32, and the fields are those of `TokenTree`."""

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
        parent: ``[K]``, -1 for node 0, which is above all others.
        length: ``[K]`` tokens of each node.
        leaf_node: ``[L]``, the node at which each leaf ends.

    Raises:
        ValueError: a childless node is no leaf's.
    """
    made = Structure(*_ordered(*(np.ascontiguousarray(array, np.int64) for array in (parent, length, leaf_node))))
    if (made.last_leaf < made.first_leaf).any():
        raise ValueError("A childless node must be the end of a leaf; name it in leaf_nodes or leave it out.")
    return made


@numba.njit(cache=True)
def _ordered(parent: Array, length: Array, leaf_node: Array) -> tuple[Array, ...]:
    nodes, leaves, tokens = len(parent), len(leaf_node), length.sum()
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)  # the first below each node, the next beside it
    for node in range(nodes - 1, 0, -1):
        sibling[node], child[parent[node]] = child[parent[node]], node
    rank, source = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
    waiting, open_nodes = np.zeros(nodes, np.int64), 1
    for place in range(nodes):
        open_nodes -= 1
        node = waiting[open_nodes]
        source[place], rank[node] = node, place
        if sibling[node] >= 0:
            waiting[open_nodes] = sibling[node]
            open_nodes += 1
        if child[node] >= 0:
            waiting[open_nodes] = child[node]
            open_nodes += 1

    size, below = np.ones(nodes, np.int64), np.zeros(nodes, np.int64)  # nodes and leaves of each subtree
    for leaf in range(leaves):
        below[leaf_node[leaf]] += 1
    here = below.copy()
    for place in range(nodes - 1, 0, -1):
        node = source[place]
        size[parent[node]] += size[node]
        below[parent[node]] += below[node]

    above, start, run = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    first, last = np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    row, leaf = 0, 0
    for place in range(nodes):
        node = source[place]
        above[place] = rank[parent[node]] if node else -1
        start[place], run[place] = row, length[node]
        first[place], last[place] = leaf, leaf + below[node] - 1
        row += length[node]
        leaf += here[node]

    begin = np.cumsum(length) - length
    depth = np.zeros(nodes, np.int64)  # tokens above each node
    position, before = np.empty(tokens, np.int32), np.empty(tokens, np.int32)
    end, rows = np.empty(tokens, np.int32), np.empty(tokens, np.int32)
    for place in range(nodes):
        node, up = source[place], above[place]
        if place:
            depth[place] = depth[up] + run[up]
        after = place + size[node]
        stop = start[after] if after < nodes else tokens
        for within in range(run[place]):
            row = start[place] + within
            position[row], end[row], rows[row] = depth[place] + within, stop, begin[node] + within
            before[row] = row - 1 if within else start[up] + run[up] - 1 if place else -1

    # Leaves of one node keep their order: ranks are handed out as they come.
    next_rank = np.empty(nodes, np.int64)
    next_rank[:] = first
    leaf_place, order = np.empty(leaves, np.int32), np.empty(leaves, np.int32)
    for leaf in range(leaves):
        place = rank[leaf_node[leaf]]
        leaf_place[leaf] = place
        order[next_rank[place]] = leaf
        next_rank[place] += 1
    return above, start, run, first, last, position, before, end, leaf_place, order, source, rows
