"""Several trees as one: `join` merges trees of one prompt, `side_by_side` concatenates any.

`side_by_side` makes one structure with several roots, so that an array operation covers all trees at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .columns import COLUMNS, Array
from .media import distinct
from .segment import Segment
from .tree import TokenTree, of_runs


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """One tree with the leaves of ``trees``, tree after tree; equal tokens of different trees are not merged, but for
    the beginning that their prompts share.

    Columns of tokens, leaves and paths and rewards are kept; a reward that a tree lacks is NaN for its leaves. Episodes
    get new numbers, and responses that are in none become episodes where there are any.

    Raises:
        ValueError: the trees' prompts differ, and they are no trees of episodes that begin with the same token.
    """
    first = trees[0]
    prompts = [tree.token_id[: tree.prompt_length] for tree in trees]
    shared = min(map(len, prompts))
    for ids in prompts:
        differ = np.flatnonzero(ids[:shared] != prompts[0][:shared])
        shared = int(differ[0]) if len(differ) else shared
    of_episodes = any("episode" in tree.columns for tree in trees)
    if shared == 0 or (not of_episodes and any(len(ids) != shared for ids in prompts)):
        raise ValueError("Trees of different prompts cannot be joined.")
    parents, segments, leaves = [-1], [_part(_segments(first)[0], 0, shared)], list[int]()
    for tree in trees:
        nodes = _segments(tree)
        rest, shift = _part(nodes[0], shared, len(nodes[0])), len(segments)
        # node 0 of the tree is what its prompt has further, an empty node where that is nothing
        parents += [0, *(tree.parent[1:] + shift).tolist()]
        segments += [rest, *nodes[1:]]
        leaves += (tree.leaf_node + shift).tolist()
    names = dict.fromkeys(name for segment in segments if len(segment) for name in segment.columns)
    lengths = [len(segment) for segment in segments]
    columns = {name: COLUMNS[name].joined([s.columns.get(name) for s in segments], lengths) for name in names}
    joined = of_runs(
        parents,
        lengths,
        Segment(np.concatenate([segment.token_ids for segment in segments]), columns),
        leaves,
        np.concatenate([tree.status for tree in trees]),
        np.concatenate([tree.leaf_prompt for tree in trees]),
    )
    joined.pictures = distinct([picture for tree in trees for picture in tree.pictures])
    of_paths = [name for tree in trees for name in tree.columns if COLUMNS[name].per in ("leaf", "path")]
    for name in dict.fromkeys(of_paths):
        joined.set(name, np.concatenate([getattr(tree, name) for tree in trees]))
    if of_episodes:
        joined.set("episode", _episodes(trees))
    for name in dict.fromkeys(name for tree in trees for name in tree.rewards):
        parts = [tree.rewards.get(name, np.full(tree.num_leaves, np.nan, np.float32)) for tree in trees]
        joined.rewards[name] = np.concatenate(parts)
    counts, calls = Counter[str](), Counter[str]()
    for tree in trees:  # the last tree's value counts; errors name leaves by number, and the numbers change
        joined.meta |= {name: value for name, value in tree.meta.items() if name != "errors"}
        counts.update(tree.meta.get("counts", {}))
        calls.update(tree.meta.get("agent", {}))
    if counts:
        joined.meta["counts"] = dict(counts)
    if calls:
        joined.meta["agent"] = dict(calls)
        joined.meta["timeline"] = [times for tree in trees for times in _timeline(tree)]
    return joined


def _episodes(trees: Sequence[TokenTree]) -> Array:  # [L] int64
    """Return the numbers of the episodes of all trees, tree after tree."""
    numbers, begin = [], 0
    for tree in trees:
        alone = np.where(tree.episode < 0, np.iinfo(np.int32).max + np.arange(tree.num_leaves), tree.episode)
        _, number = np.unique(alone, return_inverse=True)
        numbers.append(begin + number)
        begin += int(number.max()) + 1
    return np.concatenate(numbers)


def _timeline(tree: TokenTree) -> list[Any]:
    """Return the times of a tree's episodes by their numbers in the joined tree; None for responses of no agent."""
    times, numbers = tree.meta.get("timeline", []), np.unique(tree.episode)
    alone = int(np.count_nonzero(tree.episode < 0))
    return [times[n] if n < len(times) else None for n in numbers[numbers >= 0].tolist()] + [None] * alone


def _part(segment: Segment, begin: int, end: int) -> Segment:
    return Segment(segment.token_ids[begin:end], {name: values[begin:end] for name, values in segment.columns.items()})


def _segments(tree: TokenTree) -> list[Segment]:
    """The nodes of ``tree`` with their token columns."""
    of_tokens = {name: values for name, values in tree.columns.items() if COLUMNS[name].per == "token"}
    segments = []
    for start, length in zip(tree.start.tolist(), tree.length.tolist(), strict=True):
        rows = slice(start, start + length)
        segments.append(Segment(tree.token_id[rows], {name: values[rows] for name, values in of_tokens.items()}))
    return segments


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
