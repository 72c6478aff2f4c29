"""The rows that a model computes for a tree: one for every distinct prefix of token ids.

A tree keeps a token for each record: siblings that sampled the same id with different log-probs, versions, masks or
origins are different tokens, and each is a target of the loss. Hidden states depend on the ids alone, so tokens that
end the same prefix share a row, which predicts the targets after all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from .build import key_slot
from .columns import Array
from .tree import TokenTree


class Rows(NamedTuple):
    """Rows in depth-first preorder: row ``i`` sees row ``j`` iff ``j <= i < end[j]``."""

    of_token: Array  # [T] int64, the row of each token
    token: Array  # [R] int64, the first token of each row
    position: Array  # [R] int32, depth along the path
    end: Array  # [R] int32, one past the last row below

    @property
    def count(self) -> int:
        return len(self.token)

    @property
    def visible(self) -> float:
        """Pairs of a row and a row that it sees."""
        return float(self.position.sum(dtype=np.int64) + self.count)


def distinct_rows(tree: TokenTree) -> Rows:
    """One row a distinct prefix of ``tree``, in time linear in its tokens; without any to merge, a row a token.

    Children keep the order of their first tokens. Trees side by side (`side_by_side`) are not merged with each other.
    """
    of_token, token, end = _merge(tree.parent_row, tree.token_id, tree.num_nodes)
    return Rows(of_token, token, tree.position[token], end)


@numba.njit(cache=True)
def _merge(parent_row: Array, token_id: Array, nodes: int) -> tuple[Array, Array, Array]:
    """Row of each token, first token of each row, and end of each row."""
    tokens = len(token_id)
    prefix = np.empty(tokens, np.int64)  # of each token, numbered in the order of their first tokens
    source = np.empty(tokens, np.int64)  # first token of each prefix
    above = np.empty(tokens, np.int64)  # the prefix one token shorter, -1 for a root
    child = np.full(tokens, -1, np.int64)  # the first prefix one token longer
    # All but the first prefix below one are in a table by (prefix, id); a node adds one at most.
    size = 4
    while size < 4 * nodes:
        size *= 2
    keys, found = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    count = 0
    for token in range(tokens):
        up = prefix[parent_row[token]] if parent_row[token] >= 0 else -1
        here = child[up] if up >= 0 else -1
        slot = -1
        if here >= 0 and token_id[source[here]] != token_id[token]:
            slot = key_slot(keys, up, token_id[token])
            here = found[slot]
        if here < 0:
            here = count
            source[here], above[here] = token, up
            if slot >= 0:
                found[slot] = here
            elif up >= 0:
                child[up] = here
            count += 1
        prefix[token] = here

    below = np.ones(count, np.int64)  # rows of each prefix and all longer ones
    for here in range(count - 1, -1, -1):
        if above[here] >= 0:
            below[above[here]] += below[here]
    row, free = np.empty(count, np.int64), np.empty(count, np.int64)  # `free`: the row of the next child
    first, end = np.empty(count, np.int64), np.empty(count, np.int32)
    next_root = 0
    for here in range(count):
        if above[here] >= 0:
            row[here] = free[above[here]]
            free[above[here]] += below[here]
        else:
            row[here] = next_root
            next_root += below[here]
        free[here] = row[here] + 1
        first[row[here]], end[row[here]] = source[here], row[here] + below[here]
    of_token = np.empty(tokens, np.int64)
    for token in range(tokens):
        of_token[token] = row[prefix[token]]
    return of_token, first, end
