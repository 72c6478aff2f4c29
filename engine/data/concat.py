"""Several trees as one: `join` merges trees of one prompt, `side_by_side` concatenates any.

`side_by_side` makes one structure with several roots, so that an array operation covers all trees at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .columns import COLUMNS, Array
from .media import distinct
from .segment import LeafStatus, Segment
from .tree import TokenTree


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree with the leaves of ``trees``, tree after tree; equal tokens of different trees are not merged.

    Columns of tokens, leaves and paths and rewards are kept; a reward that a tree lacks is NaN for its leaves.

    Raises:
        ValueError: the trees' prompts differ, or the prompt of a leaf is longer than its tree's.
    """
    first = trees[0]
    prompt = first.token_id[: first.prompt_length]
    parents, segments, leaves, statuses = [-1], _segments(first)[:1], [], []
    for tree in trees:
        if not np.array_equal(tree.token_id[: tree.prompt_length], prompt):
            raise ValueError("Trees of different prompts cannot be joined.")
        if (tree.leaf_prompt != tree.prompt_length).any():
            raise ValueError("Trees whose leaves have prompts of their own cannot be joined.")
        shift = len(segments) - 1
        parents += [p + shift if p else 0 for p in tree.parent[1:].tolist()]
        segments += _segments(tree)[1:]
        leaves += [node + shift if node else 0 for node in tree.leaf_node.tolist()]
        statuses += [LeafStatus(int(status)) for status in tree.status]
    pictures = [picture for tree in trees for picture in tree.pictures]
    joined = TokenTree.from_nodes(parents, segments, leaves, statuses, pictures=pictures)
    of_paths = [name for tree in trees for name in tree.columns if COLUMNS[name].per in ("leaf", "path")]
    for name in dict.fromkeys(of_paths):
        joined.set(name, np.concatenate([getattr(tree, name) for tree in trees]))
    for name in dict.fromkeys(name for tree in trees for name in tree.rewards):
        parts = [tree.rewards.get(name, np.full(tree.num_leaves, np.nan, np.float32)) for tree in trees]
        joined.rewards[name] = np.concatenate(parts)
    counts = Counter[str]()
    for tree in trees:  # the last tree's value counts; errors name leaves by number, and the numbers change
        joined.meta |= {name: value for name, value in tree.meta.items() if name != "errors"}
        counts.update(tree.meta.get("counts", {}))
    if counts:
        joined.meta["counts"] = dict(counts)
    return joined


def _segments(tree: TokenTree) -> list[Segment]:
    """The nodes of ``tree`` with their token columns."""
    of_tokens = {name: values for name, values in tree.columns.items() if COLUMNS[name].per == "token"}
    found = []
    for start, length in zip(tree.start.tolist(), tree.length.tolist(), strict=True):
        rows = slice(start, start + length)
        found.append(Segment(tree.token_id[rows], {name: values[rows] for name, values in of_tokens.items()}))
    return found


def side_by_side(trees: Sequence[TokenTree]) -> TokenTree:
    """The rows, nodes and leaves of ``trees``, tree after tree, without rewards and meta.

    All properties of `TokenTree` hold for the result except `prompt_length`: every node without a parent is a prompt.
    """
    nodes, rows, leaves = (
        np.cumsum([0, *(getattr(tree, of) for tree in trees)]) for of in ("num_nodes", "num_tokens", "num_leaves")
    )

    def of_all(name: str, first: Array | None = None) -> Array:
        """The field ``name`` of all trees; with ``first``, indices that are shifted by each tree's first one."""
        values = [getattr(tree, name) for tree in trees]
        joined = np.concatenate(values)
        return joined if first is None else joined + np.repeat(first[:-1].astype(np.int32), list(map(len, values)))

    def column(name: str) -> Array:
        parts = [tree.columns.get(name) for tree in trees]
        return COLUMNS[name].joined(parts, [len(getattr(tree, name)) for tree in trees])

    parent = of_all("parent", nodes)
    parent[nodes[:-1]] = -1
    parent_row = of_all("parent_row", rows)
    parent_row[rows[:-1]] = -1
    return TokenTree(
        parent=parent,
        start=of_all("start", rows),
        length=of_all("length"),
        first_leaf=of_all("first_leaf", leaves),
        last_leaf=of_all("last_leaf", leaves),
        token_id=of_all("token_id"),
        position=of_all("position"),
        parent_row=parent_row,
        subtree_end=of_all("subtree_end", rows),
        leaf_node=of_all("leaf_node", nodes),
        leaf_order=of_all("leaf_order", leaves),
        leaf_prompt=of_all("leaf_prompt"),
        columns={name: column(name) for name in dict.fromkeys(name for tree in trees for name in tree.columns)},
        pictures=distinct([picture for tree in trees for picture in tree.pictures]),
    )
