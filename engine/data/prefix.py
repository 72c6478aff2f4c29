"""Prefix trees of token sequences, in time linear in their tokens.

Two response tokens merge only where their ids and all columns that must be equal agree, bit for bit. A token
that is mere *context* to a sequence, its prompt, needs only the id: what it is to the other sequence (a prompt too, or
an earlier turn's response) stays true, and it does not enter the loss of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class PrefixTree(NamedTuple):
    """Node 0 is the empty root. Children are numbered in the order of the sequences that first reached them."""

    parent: Array  # [K] int64, -1 for the root
    begin: Array  # [K] int64, the node's run among the concatenated tokens
    end: Array  # [K] int64, exclusive
    leaf_node: Array  # [S] int64, where each sequence ends


def prefix_tree(
    ids: Array,  # [n] int32, the sequences end to end
    equal: Sequence[Array],  # columns [n] of at most 32 bits that must agree, bit for bit
    lengths: Array,  # [S] int64
    context: Array,  # [S] int64, tokens at the start of each sequence that are its prompt
) -> PrefixTree:
    """The tree of the sequences' common prefixes."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # Short prompts first: what a sequence reads as context was then put in by the one that answered there.
    order = np.argsort(context, kind="stable")
    parent, begin, end, rank, leaf_node = _insert(
        ids, _bits(equal, len(ids)), ends - lengths, ends, context.astype(np.int64), order
    )
    by_rank = np.argsort(rank, kind="stable")
    number = np.empty_like(by_rank)
    number[by_rank] = np.arange(len(by_rank))
    above = parent[by_rank]
    return PrefixTree(
        np.where(above < 0, -1, number[np.maximum(above, 0)]), begin[by_rank], end[by_rank], number[leaf_node]
    )


def _bits(columns: Sequence[Array], count: int) -> Array:  # [columns, n] int32
    """The columns as integers that are equal where the values are, bit for bit."""
    out = np.empty((len(columns), count), np.int32)
    for row, values in zip(out, columns, strict=True):
        row[:] = values.view(np.int32) if values.dtype == np.float32 else values
    return out


@numba.njit(cache=True)
def _slot(keys: Array, node: int, token: int) -> Any:
    """Where the key (node, token) is, or would be, in an open-addressing table of a power of two."""
    key = (np.int64(node) << np.int64(32)) | (np.int64(token) & np.int64(0xFFFFFFFF))
    hashed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(hashed >> np.uint64(20)) & (len(keys) - 1)
    while keys[at] != -1 and keys[at] != key:
        at = (at + 1) & (len(keys) - 1)
    keys[at] = key
    return at


@numba.njit(cache=True)
def _common(ids: Array, equal: Array, a: int, a_end: int, b: int, b_end: int, response: int) -> int:
    """How many tokens from ``a`` and from ``b`` on merge; those of b from ``response`` on are in its loss."""
    n = 0
    while a + n < a_end and b + n < b_end and ids[a + n] == ids[b + n]:
        if b + n >= response:
            for values in equal:
                if values[a + n] != values[b + n]:
                    return n
        n += 1
    return n


@numba.njit(cache=True)
def _insert(
    ids: Array, equal: Array, begins: Array, ends: Array, context: Array, order: Array
) -> tuple[Array, Array, Array, Array, Array]:
    sequences = len(begins)
    most = 2 * sequences + 1
    parent, begin, end = np.full(most, -1, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    rank, leaf_node = np.zeros(most, np.int64), np.zeros(sequences, np.int64)
    sibling = np.full(most, -1, np.int64)  # the next child of the same parent that begins with the same id
    size = 4
    while size < 4 * most:
        size *= 2
    keys, first_child = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    nodes = 1
    for s in order:
        node, at, stop = 0, begins[s], ends[s]
        response = at + context[s]
        while at < stop:
            slot = _slot(keys, node, ids[at])
            best, shared = -1, 0
            child = first_child[slot]
            while child >= 0:
                n = _common(ids, equal, begin[child], end[child], at, stop, response)
                if n > shared:
                    best, shared = child, n
                child = sibling[child]
            new = nodes
            if best < 0:
                parent[new], begin[new], end[new], rank[new] = node, at, stop, new
                sibling[new], first_child[slot] = first_child[slot], new
                nodes += 1
                node, at = new, stop
            elif begin[best] + shared == end[best]:
                node, at = best, at + shared
            else:  # the branch lies inside a run: its upper part becomes a node in the run's place
                parent[new], begin[new], end[new], rank[new] = node, begin[best], begin[best] + shared, rank[best]
                sibling[new] = sibling[best]
                if first_child[slot] == best:
                    first_child[slot] = new
                else:
                    before = first_child[slot]
                    while sibling[before] != best:
                        before = sibling[before]
                    sibling[before] = new
                nodes += 1
                parent[best], sibling[best] = new, -1
                begin[best] += shared
                first_child[_slot(keys, new, ids[begin[best]])] = best
                node, at = new, at + shared
        leaf_node[s] = node
    return parent[:nodes], begin[:nodes], end[:nodes], rank[:nodes], leaf_node
