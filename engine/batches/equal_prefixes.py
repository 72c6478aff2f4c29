"""Merging the equal tokens of responses that were sampled independently.

Responses of a group often begin alike. `pack` computes a row for each distinct prefix in any case; tokens whose records
agree too can be one target, which carries the sums of their leaves' credit.
"""

from __future__ import annotations

import numpy as np

from ..data.build import prefix_tree
from ..data.columns import COLUMNS, Array
from ..data.tree import TokenTree, in_order
from .rows import numbered


def share_equal_prefixes(tree: TokenTree) -> TokenTree:
    """Merge equal prefixes of different responses into shared nodes. Returns ``tree`` itself if nothing can be merged.

    Tokens merge only if id, log-prob (bit for bit), version, mask and all other columns that must be equal agree. These
    include routes: other experts give what follows another hidden state.
    Leaves keep their order and columns. Nodes change, so a tree with a column of nodes is returned as it is.
    """
    if tree.num_leaves == 1 or any(COLUMNS[name].per == "node" for name in tree.columns):
        return tree
    prompt = tree.prompt_length
    rows = tree.all_path_rows
    rows = rows[tree.position[rows] >= prompt]
    token_columns, total = {}, tree.path_length - prompt
    for name, values in tree.columns.items():
        if COLUMNS[name].per == "token":
            if COLUMNS[name].merge == "sum":
                return tree
            token_columns[name] = values
    equal = [
        (numbered(values) if COLUMNS[name].axes else values)[rows]
        for name, values in token_columns.items()
        if COLUMNS[name].merge == "equal"
    ]
    nodes = prefix_tree(tree.token_id[rows], equal, total, tree.leaf_prompt - prompt)
    length = nodes.end - nodes.begin
    if prompt + length.sum() == tree.num_tokens:
        return tree
    source = rows[np.repeat(nodes.begin - (np.cumsum(length) - length), length) + np.arange(length.sum())]
    source = np.concatenate([np.arange(prompt), source])
    length[0] = prompt
    columns: dict[str, Array] = {
        name: token_columns[name][source] if name in token_columns else v for name, v in tree.columns.items()
    }
    shared = in_order(nodes.parent, length, tree.token_id[source], nodes.leaf_node, tree.leaf_prompt, columns)
    shared.rewards, shared.meta, shared.pictures = dict(tree.rewards), dict(tree.meta), tree.pictures
    return shared
