"""Branches that happen to have sampled the same tokens, made one.

Responses of a group that were sampled apart often begin alike: a policy that is sure of itself says the same first.
Their tokens have one predecessor, so one hidden state and one log-probability; as a shared token they are computed once
and carry the sums of their leaves' credit, as every shared token of a `TreeBatch` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .build import prefix_tree
from .columns import COLUMNS, Array
from .tree import TokenTree, in_order


def share_equal_prefixes(tree: TokenTree) -> TokenTree:
    """``tree`` with every prefix that its leaves' responses have in common once; itself where there is none more.

    Tokens become one only where id, log-prob (bit for bit), version, mask and all other columns that must be equal
    agree. Leaves keep their order and all that is theirs. Nodes are others: a tree whose columns have a value a node
    is left as it is.
    """
    if tree.num_leaves == 1 or any(COLUMNS[name].per == "node" for name in tree.columns):
        return tree
    prompt = tree.prompt_length
    rows = tree.all_path_rows
    rows = rows[tree.position[rows] >= prompt]
    own, total = {}, tree.path_length - prompt
    for name, values in tree.columns.items():
        if COLUMNS[name].per == "token":
            if COLUMNS[name].merge == "sum":
                return tree
            own[name] = values
    equal = [values[rows] for name, values in own.items() if COLUMNS[name].merge == "equal"]
    nodes = prefix_tree(tree.token_id[rows], equal, total, tree.leaf_prompt - prompt)
    length = nodes.end - nodes.begin
    if prompt + length.sum() == tree.num_tokens:
        return tree
    source = rows[np.repeat(nodes.begin - (np.cumsum(length) - length), length) + np.arange(length.sum())]
    source = np.concatenate([np.arange(prompt), source])
    length[0] = prompt
    columns: dict[str, Array] = {name: own[name][source] if name in own else v for name, v in tree.columns.items()}
    shared = in_order(nodes.parent, length, tree.token_id[source], nodes.leaf_node, tree.leaf_prompt, columns)
    shared.rewards, shared.meta = dict(tree.rewards), dict(tree.meta)
    return shared


def distinct_prefixes(tree: TokenTree) -> TokenTree:
    """The tokens and leaves of ``tree`` without its columns, every prefix once: all that a model computes to score it.

    What a model says of a token depends on the ids before it and on nothing that was recorded of either.
    """
    return share_equal_prefixes(replace(tree, columns={}, rewards={}))
