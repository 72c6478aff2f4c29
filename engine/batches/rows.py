"""The rows that a model computes for a tree: one for every distinct prefix of token ids.

A tree keeps a token for each record: siblings that sampled the same id with different log-probs, versions, masks or
origins are different tokens, and each is a target of the loss. Hidden states depend on the ids alone, so tokens that
end the same prefix share a row, which predicts the targets after all of them. Where routes are recorded, hidden states
depend on them too when they are replayed: a prefix is then one of ids and routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from ..data.build import key_slot
from ..data.columns import COLUMNS, Array
from ..data.tree import TokenTree


class Rows(NamedTuple):
    """Rows in depth-first preorder: row ``i`` sees row ``j`` iff ``j <= i < end[j]``."""

    of_token: Array  # [T] int64, the row of each token
    token: Array  # [R] int64, the first token of each row
    position: Array  # [R] int32, depth along the path
    end: Array  # [R] int32, one past the last row below

    @property
    def num_rows(self) -> int:
        return len(self.token)

    @property
    def visible(self) -> float:
        """Pairs of a row and a row that it sees."""
        return float(self.position.sum(dtype=np.int64) + self.num_rows)


def distinct_rows(tree: TokenTree) -> Rows:
    """One row a distinct prefix of ``tree``, of ids and recorded routes, in time linear in its tokens.

    Children keep the order of their first tokens. If no siblings begin alike, every token has a row of its own.
    """
    first = (tree.parent[1:].astype(np.int64) << 32) | tree.token_id[tree.start[1:]]
    if len(np.unique(first)) == len(first):
        every = np.arange(tree.num_tokens)
        return Rows(every, every, tree.position, tree.subtree_end)
    identity = numbered(tree.token_id, tree.routes) if "routes" in tree.columns else tree.token_id
    of_token, token, end = _merge(tree.parent_row, identity, tree.num_nodes)
    return Rows(of_token, token, tree.position[token], end)


def rows_of_all(trees: Sequence[TokenTree]) -> Rows:
    """Return the rows of several trees side by side; prompts that begin alike are computed below one beginning.

    Rows that predict a target stay apart, a prompt's last one too: the teacher of a tree may differ from the others'.
    """
    tokens = [tree.num_tokens for tree in trees]
    first = np.cumsum([1, *tokens])[:-1]  # every tree hangs below one token more, which is left out again
    above = [np.where(tree.parent_row < 0, 0, tree.parent_row + n) for tree, n in zip(trees, first, strict=True)]
    identity = np.concatenate([[0], *(tree.token_id for tree in trees)]).astype(np.int32)
    identity[first + [tree.prompt_length - 1 for tree in trees]] = -1 - np.arange(len(trees))
    if any("routes" in tree.columns for tree in trees):
        routes = COLUMNS["routes"].joined([tree.columns.get("routes") for tree in trees], tokens)
        identity[1:] = numbered(identity[1:], routes)
    nodes = 1 + sum(tree.num_nodes for tree in trees)
    of_token, token, end = _merge(np.concatenate([[-1], *above]), identity, nodes)
    token = token[1:] - 1
    position = np.concatenate([tree.position for tree in trees])[token]
    return Rows(of_token[1:] - 1, token, position, end[1:] - np.int32(1))


def numbered(*columns: Array) -> Array:  # [T, ...] each -> [T] int32
    """Return a number for each token, equal where all ``columns`` are equal, bit for bit."""
    parts = [np.ascontiguousarray(c).reshape(len(c), -1) for c in columns]
    joined = np.concatenate([p.view(np.uint8) if p.size else np.zeros(p.shape, np.uint8) for p in parts], axis=1)
    content, width = joined.tobytes(), joined.shape[1]
    number_of: dict[bytes, int] = {}
    numbers = [number_of.setdefault(content[i : i + width], len(number_of)) for i in range(0, len(content), width)]
    return np.array(numbers, np.int32)


def head_rows(row: Array, temperature: Array) -> tuple[Array, Array]:  # [M], [M] -> [R] int64, [M] int64
    """The rows that the head reads, and the one of each target: the distinct rows, each once for every temperature that
    its targets were sampled at (NaN is one of its own)."""
    values, code = np.unique(temperature, return_inverse=True)
    count = max(len(values), 1)
    codes, index = np.unique(row * count + code.reshape(-1), return_inverse=True)
    return codes // count, index.reshape(-1)


def concat_rows(rows: Sequence[Rows]) -> Rows:
    """The rows of several trees side by side (`side_by_side`)."""
    tokens = np.cumsum([0, *(len(of_tree.of_token) for of_tree in rows)])
    before = np.cumsum([0, *(of_tree.num_rows for of_tree in rows)])
    return Rows(
        np.concatenate([of_tree.of_token + n for of_tree, n in zip(rows, before, strict=False)]),
        np.concatenate([of_tree.token + n for of_tree, n in zip(rows, tokens, strict=False)]),
        np.concatenate([of_tree.position for of_tree in rows]),
        np.concatenate([of_tree.end + np.int32(n) for of_tree, n in zip(rows, before, strict=False)]),
    )


@numba.njit(cache=True)
def _merge(parent_row: Array, token_id: Array, nodes: int) -> tuple[Array, Array, Array]:
    """Row of each token, first token of each row, and end of each row."""
    tokens = len(token_id)
    prefix = np.empty(tokens, np.int64)  # of each token, numbered in the order of their first tokens
    source = np.empty(tokens, np.int64)  # first token of each prefix
    above = np.empty(tokens, np.int64)  # the prefix one token shorter, -1 for the root's first
    child = np.full(tokens, -1, np.int64)  # the first prefix one token longer
    # All but the first prefix below one are in a table by (prefix, id); a node adds one at most.
    size = 4
    while size < 4 * nodes:
        size *= 2
    keys, slot_prefix = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    count = 0
    for token in range(tokens):
        up = prefix[parent_row[token]] if parent_row[token] >= 0 else -1
        here = child[up] if up >= 0 else -1
        slot = -1
        if here >= 0 and token_id[source[here]] != token_id[token]:
            slot = key_slot(keys, up, token_id[token])
            here = slot_prefix[slot]
        if here < 0:
            here = count
            source[here], above[here] = token, up
            if slot >= 0:
                slot_prefix[slot] = here
            elif up >= 0:
                child[up] = here
            count += 1
        prefix[token] = here

    below = np.ones(count, np.int64)  # rows of each prefix and all longer ones
    for here in range(count - 1, 0, -1):
        below[above[here]] += below[here]
    row, free = np.empty(count, np.int64), np.empty(count, np.int64)  # `free`: the row of the next child
    first, end = np.empty(count, np.int64), np.empty(count, np.int32)
    for here in range(count):
        row[here] = 0
        if here:
            row[here] = free[above[here]]
            free[above[here]] += below[here]
        free[here] = row[here] + 1
        first[row[here]], end[row[here]] = source[here], row[here] + below[here]
    of_token = np.empty(tokens, np.int64)
    for token in range(tokens):
        of_token[token] = row[prefix[token]]
    return of_token, first, end
