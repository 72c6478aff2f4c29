"""The nodes of a tree, checked, without empty ones, in depth-first order."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numba
import numpy as np

from . import checks
from .columns import COLUMNS, Array
from .segment import LeafStatus, Segment


class Structure(NamedTuple):
    """Nodes in depth-first preorder and the arrays derived from it, int32; fields as in `TokenTree`."""

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
    node_source: Array  # [K], the node's number in the order given
    row_source: Array  # [T], the token's place in the order given

    def ordered(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """``columns`` reordered as the nodes were; columns of leaves and paths stay as they are."""
        source = {"token": self.row_source, "node": self.node_source}
        return {
            name: values[source[per]] if (per := COLUMNS[name].per) in source else values
            for name, values in columns.items()
        }


def order_nodes(parent: Array, length: Array, leaf_node: Array) -> Structure:
    """Put nodes into depth-first preorder, children in the order of their numbers.

    Args:
        parent: ``[K]``, -1 for node 0, the root.
        length: ``[K]`` tokens of each node.
        leaf_node: ``[L]``, the node at which each leaf ends.

    Raises:
        ValueError: no leaf ends at a childless node.
    """
    structure = Structure(*_ordered(*(np.ascontiguousarray(array, np.int64) for array in (parent, length, leaf_node))))
    if (structure.last_leaf < structure.first_leaf).any():
        raise ValueError("A childless node must be the end of a leaf; name it in leaf_nodes or leave it out.")
    return structure


@numba.njit(cache=True)
def _preorder(parent: Array) -> tuple[Array, Array]:
    """The place of each node in depth-first preorder, and the node at each place."""
    nodes = len(parent)
    child, sibling = np.full(nodes, -1), np.full(nodes, -1)  # first child and next sibling of each node
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
    return rank, source


@numba.njit(cache=True)
def _ordered(parent: Array, length: Array, leaf_node: Array) -> tuple[Array, ...]:
    """The arrays of `Structure`."""
    nodes, leaves, tokens = len(parent), len(leaf_node), length.sum()
    rank, source = _preorder(parent)

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

    # Leaves that end at one node keep their order.
    next_rank = np.empty(nodes, np.int64)
    next_rank[:] = first
    leaf_place, order = np.empty(leaves, np.int32), np.empty(leaves, np.int32)
    for leaf in range(leaves):
        place = rank[leaf_node[leaf]]
        leaf_place[leaf] = place
        order[next_rank[place]] = leaf
        next_rank[place] += 1
    return above, start, run, first, last, position, before, end, leaf_place, order, source, rows


def check_nodes(parents: Seq[int], segments: Seq[Segment], leaf_nodes: Seq[int], statuses: Seq[LeafStatus]) -> None:
    """Check the arguments of :meth:`TokenTree.from_nodes`.

    Raises:
        ValueError: they do not describe a tree.
    """
    checks.all_of("segments", segments, Segment)
    if not segments or not len(segments[0]):
        raise ValueError("A TokenTree needs a prompt of at least one token; the root segment is empty.")
    if checks.count("leaf_nodes", leaf_nodes) == 0:
        raise ValueError("A TokenTree needs at least one leaf; no responses were given.")
    if checks.count("parents", parents) != len(segments) or len(leaf_nodes) != checks.count("statuses", statuses):
        raise ValueError(
            f"Got {len(parents)} parents for {len(segments)} segments and {len(leaf_nodes)} leaves for "
            f"{len(statuses)} statuses; give one of each."
        )
    above = checks.integers("parents", parents).tolist()
    ends = checks.integers("leaf_nodes", leaf_nodes).tolist()
    if above[0] != -1 or any(not 0 <= p < i for i, p in enumerate(above) if i):
        raise ValueError("parents[0] must be -1 and every other parent must precede its child.")
    if min(ends) < 0 or max(ends) >= len(above):
        raise ValueError(f"leaf_nodes must be in 0..{len(above) - 1}, got {min(ends)}..{max(ends)}.")


def without_empty(
    parents: Seq[int], lengths: Seq[int], leaf_nodes: Seq[int]
) -> tuple[Array, Array, Array]:  # [K], [K], [L] int32
    """Return the parents, lengths and leaf nodes with each empty node replaced by its nearest non-empty ancestor."""
    new: list[int] = []
    kept = 0
    for node_parent, node_length in zip(parents, lengths, strict=True):
        new.append(kept if node_length else new[node_parent])
        kept += node_length > 0
    parent = np.array([-1] + [new[p] for p, n in zip(parents[1:], lengths[1:], strict=True) if n], np.int32)
    return parent, np.array([n for n in lengths if n], np.int32), np.array([new[n] for n in leaf_nodes], np.int32)
