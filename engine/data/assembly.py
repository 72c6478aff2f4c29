"""The tensors of a `TreeBatch`, from the trees that it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .batch import TreeBatch
from .columns import COLUMNS, Array
from .side_by_side import side_by_side
from .tree import TokenTree

CREDIT = ("token_advantage", "node_advantage", "path_advantage")
"""Columns of credit finer than a leaf's."""


def assemble(parts: list[tuple[int, TokenTree, Array]], device: torch.device | str | None) -> TreeBatch:
    """``parts`` as one batch, each with its number in the list given to `pack`, and the leaves it has of that tree."""
    trees = [tree for _, tree, _ in parts]
    all_of = side_by_side(trees)
    node = np.repeat(np.arange(all_of.num_nodes), all_of.length)
    response = all_of.parent[node] >= 0
    before = np.append(0, np.cumsum(response))  # targets before each row
    order = all_of.leaf_order
    row = all_of.parent_row[response].astype(np.int64)
    head_row, head_index = np.unique(row, return_inverse=True)
    loss_mask = (all_of.loss_mask & (all_of.response_leaves > 0))[response]
    rows = np.cumsum([0, *(tree.num_tokens for tree in trees)])

    def target_of(row: Array) -> Array:
        return np.where(response[row], before[row], -1)

    def tensor(values: Array, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device)

    leaf_start = target_of(all_of.row_at(all_of.leaf_prompt - 1)[order])
    paths = _paths(all_of, trees, before) if any(_along_paths(tree) for tree in trees) else {}
    along = {name: torch.from_numpy(values).to(device) for name, values in paths.items()}
    return TreeBatch(
        trees=tuple(trees),
        tree_index=tuple(index for index, _, _ in parts),
        leaf_index=tuple(leaf_index for _, _, leaf_index in parts),
        input_ids=tensor(all_of.token_id),
        position_ids=tensor(all_of.position),
        subtree_end=tensor(all_of.subtree_end, np.int32),
        row=tensor(row),
        target=tensor(all_of.token_id[response]),
        head_row=tensor(head_row),
        head_index=tensor(head_index.reshape(-1)),
        loss_mask=tensor(loss_mask, np.bool_),
        columns={name: torch.from_numpy(values).to(device) for name, values in _columns(all_of, response, loss_mask)},
        target_end=tensor(before[all_of.subtree_end[response]]),
        leaf_target=tensor(target_of(all_of.row_at(all_of.path_length - 1)[order])),
        leaf_start=tensor(leaf_start) if (leaf_start >= 0).any() else None,
        leaf_length=tensor(all_of.loss_length[order]),
        segment=tensor(node[response]),
        copies=tensor((all_of.last_leaf - all_of.first_leaf + 1)[node]),
        leaf_advantage=tensor(all_of.advantage[order], np.float64),
        mixed=any(_has_credit(tree) and tree.num_leaves > 1 for tree in trees) or _mixed(all_of),
        path_target=along.get("path_target"),
        path_leaf=along.get("path_leaf"),
        path_advantage=along.get("path_advantage"),
        cu_seqlens=tensor(rows, np.int32) if all(tree.num_leaves == 1 for tree in trees) else None,
        longest=int(all_of.path_length.max()),
        padded=None,
        place=torch.arange(all_of.num_tokens, device=device),
        pieces=(),
    )


def _along_paths(tree: TokenTree) -> bool:
    """Whether something has a value for every response token of every leaf."""
    return any(COLUMNS[name].to_device and COLUMNS[name].per == "path" for name in tree.columns) or _has_credit(tree)


def _has_credit(tree: TokenTree) -> bool:
    return any(name in tree.columns for name in CREDIT)


def _paths(all_of: TokenTree, trees: Sequence[TokenTree], before: Array) -> dict[str, Array]:
    """Target, leaf and credit of every leaf's every response token, leaves in depth-first order."""
    in_order = _depth_first(all_of)
    rank = np.empty(all_of.num_leaves, np.int64)
    rank[all_of.leaf_order] = np.arange(all_of.num_leaves)
    found = {
        "path_target": before[all_of.path_tokens[in_order]],
        "path_leaf": np.repeat(rank, all_of.response_length)[in_order],
    }
    if any(map(_has_credit, trees)):
        found["path_advantage"] = np.concatenate([_path_credit(tree) for tree in trees])[in_order]
    return found


def _path_credit(tree: TokenTree) -> Array:  # [P] float64
    """The finest credit the tree carries, of every leaf's every response token."""
    credit = np.repeat(tree.advantage.astype(np.float64), tree.response_length)
    if "path_advantage" in tree.columns:
        credit = tree.path_advantage
    elif "token_advantage" in tree.columns:
        credit = tree.token_advantage[tree.path_tokens]
    elif "node_advantage" in tree.columns:
        credit = np.repeat(tree.node_advantage, tree.length)[tree.path_tokens]
    return credit.astype(np.float64)


def _depth_first(tree: TokenTree) -> Array:  # [P]
    """Places of a ``path`` column's values, for leaves in depth-first order."""
    first, length = np.cumsum(tree.response_length) - tree.response_length, tree.response_length[tree.leaf_order]
    return np.repeat(first[tree.leaf_order] - np.cumsum(length) + length, length) + np.arange(length.sum())


def _columns(all_of: TokenTree, response: Array, loss_mask: Array) -> Iterator[tuple[str, Array]]:
    """Columns that training reads, without those of tokens that a token in the loss has no value of."""
    for name, values in all_of.columns.items():
        column = COLUMNS[name]
        if not column.to_device or name in ("advantage", *CREDIT):
            continue
        if column.per == "leaf":
            yield name, values[all_of.leaf_order]
        elif column.per == "path":
            yield name, values[_depth_first(all_of)]
        else:
            values = (values if column.per == "token" else np.repeat(values, all_of.length))[response]
            if not (values.dtype.kind == "f" and np.isnan(values[loss_mask]).any()):
                yield name, values


def _mixed(tree: TokenTree) -> bool:
    """Whether leaves of one node below a prompt may differ in the sign of their advantage."""
    sign = np.sign(tree.advantage)[tree.leaf_order]
    changes = np.append(0, np.cumsum(sign[1:] != sign[:-1]))
    below = tree.parent >= 0
    return bool((changes[tree.last_leaf[below]] != changes[tree.first_leaf[below]]).any())
