"""One tree of several to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import COLUMNS
from .segment import LeafStatus, Segment
from .tree import TokenTree


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """The leaves of ``trees``, one tree's after the other's; equal tokens of different trees stay apart.

    Token columns, statuses and rewards are kept; what a tree lacks of the others' rewards is NaN.

    Raises:
        ValueError: their prompts differ, or a leaf has a longer prompt than the tree.
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
    joined = TokenTree.from_nodes(parents, segments, leaves, statuses)
    for name in dict.fromkeys(name for tree in trees for name in tree.rewards):
        parts = [tree.rewards.get(name, np.full(tree.num_leaves, np.nan, np.float32)) for tree in trees]
        joined.rewards[name] = np.concatenate(parts)
    for tree in trees:  # the newest counts, but what is said of leaves by their number is another leaf's now
        joined.meta |= {name: value for name, value in tree.meta.items() if name != "errors"}
    return joined


def _segments(tree: TokenTree) -> list[Segment]:
    of_tokens = {name: values for name, values in tree.columns.items() if COLUMNS[name].per == "token"}
    found = []
    for start, length in zip(tree.start.tolist(), tree.length.tolist(), strict=True):
        rows = slice(start, start + length)
        found.append(Segment(tree.token_id[rows], {name: values[rows] for name, values in of_tokens.items()}))
    return found
