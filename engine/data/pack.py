"""Packing: `pack` chooses the trees, parts of trees or leaves of each batch, `assemble` makes the batch's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from . import checks
from .batch import TreeBatch
from .columns import COLUMNS, Array
from .concat import side_by_side
from .cost import CostModel
from .pieces import cut
from .tree import TokenTree

WORTH_SHARING = 1.1
"""A tree is computed as a tree if the flat batch needs at least this many times its FLOP."""

CREDIT = ("token_advantage", "node_advantage", "path_advantage")
"""Columns of credit finer than a leaf's."""


def pack(
    trees: Sequence[TokenTree],
    *,
    max_tokens: int,
    device: torch.device | str | None = None,
    in_pieces: bool = False,
    flat: bool = False,
    unshare: CostModel | None = None,
) -> list[TreeBatch]:
    """Pack trees into batches of at most ``max_tokens`` unique tokens.

    Trees stay whole and go to the fullest batch they fit (best-fit decreasing; deterministic). A larger tree is split
    by its leaves, each part repeating the ancestors it needs; losses and gradients of the parts add up to the whole's.
    With ``in_pieces`` it becomes a batch of its own, to be computed in pieces of ``max_tokens`` that repeat nothing
    (:func:`rolltree.engine.backward`, :func:`batch_logprob`); a single path may then be longer than the budget.
    With ``flat`` nothing is shared: every leaf is a sequence of its own, and the model computes ordinary padded batches
    of at most ``max_tokens`` places, without any tree attention. It is for models whose layers no tree mask fits.
    With ``unshare`` trees that save less than a tenth of the flat batch's FLOP are packed as plain sequences, apart
    from the others: a kernel made for those may be faster by more than that.

    Raises:
        ValueError: one root-to-leaf path alone exceeds ``max_tokens``, and ``in_pieces`` is not set; or ``max_tokens``
            is below 1.
    """
    checks.all_of("trees", trees, TokenTree)
    checks.size("max_tokens", max_tokens)
    if flat:
        return _pack_flat(trees, max_tokens, device)
    parts: list[tuple[int, TokenTree, Array]] = []
    oversized: list[TreeBatch] = []
    for index, tree in enumerate(trees):
        if in_pieces and tree.num_tokens > max_tokens:
            whole = assemble([(index, tree, np.arange(tree.num_leaves))], device)
            oversized.append(replace(whole, pieces=cut(tree, max_tokens, device)))
        else:
            parts.extend((index, part, leaves) for part, leaves in _split(tree, max_tokens, index))
    plain: list[tuple[int, TokenTree, Array]] = []
    if unshare is not None:
        losing = [unshare.flat(part) < WORTH_SHARING * unshare.shared(part) for _, part, _ in parts]
        for (index, part, leaves), loses in zip(parts, losing, strict=True):
            if loses:
                plain += [(index, part.chain(i), leaves[i : i + 1]) for i in range(part.num_leaves)]
        parts = [part for part, loses in zip(parts, losing, strict=True) if not loses]
    return oversized + _best_fit(parts, max_tokens, device) + _best_fit(plain, max_tokens, device)


def _best_fit(
    parts: list[tuple[int, TokenTree, Array]], max_tokens: int, device: torch.device | str | None
) -> list[TreeBatch]:
    order = sorted(range(len(parts)), key=lambda i: (-parts[i][1].num_tokens, i))
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        size = parts[i][1].num_tokens
        fitting = [b for b in range(len(bins)) if room[b] >= size]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
        else:
            bins.append([])
            room.append(max_tokens)
            best = len(bins) - 1
        bins[best].append(i)
        room[best] -= size
    return [assemble([parts[i] for i in sorted(members)], device) for members in bins]


def _pack_flat(trees: Sequence[TokenTree], max_tokens: int, device: torch.device | str | None) -> list[TreeBatch]:
    """Every leaf alone, the longest first, as many together as fit when padded to the first."""
    leaves = [
        (index, leaf, int(length)) for index, tree in enumerate(trees) for leaf, length in enumerate(tree.path_length)
    ]
    leaves.sort(key=lambda known: -known[2])
    batches: list[TreeBatch] = []
    while leaves:
        index, leaf, longest = leaves[0]
        if longest > max_tokens:
            raise ValueError(_too_long(leaf, index, longest, max_tokens))
        taken, leaves = leaves[: max_tokens // longest], leaves[max_tokens // longest :]
        batch = assemble([(i, trees[i].chain(j), np.array([j])) for i, j, _ in taken], device)
        lengths = np.array([length for _, _, length in taken])
        place = np.arange(lengths.sum()) + np.repeat(
            np.arange(len(taken)) * longest - (np.cumsum(lengths) - lengths), lengths
        )
        batches.append(replace(batch, padded=(len(taken), longest), place=torch.from_numpy(place).to(device)))
    return batches


def _too_long(leaf: int, tree: int, length: int, max_tokens: int) -> str:
    return (
        f"Leaf {leaf} of tree {tree} is {length} tokens long with its prompt, over the budget of "
        f"max_tokens={max_tokens}; raise max_tokens or shorten prompts and responses."
    )


def _split(tree: TokenTree, max_tokens: int, index: int) -> list[tuple[TokenTree, Array]]:
    """Parts of ``tree`` within the budget, each with the leaf indices it holds."""
    everything = np.arange(tree.num_leaves)
    if tree.num_tokens <= max_tokens:
        return [(tree, everything)]
    path = tree.path_length
    if path.max() > max_tokens:
        worst = int(path.argmax())
        raise ValueError(_too_long(worst, index, int(path[worst]), max_tokens))
    # depth-first, a leaf adds the tokens below its deepest ancestor that an earlier leaf of the part also has
    node_end = (tree.node_position + tree.length).astype(np.int64)
    groups: list[list[int]] = []
    used, size = np.zeros(tree.num_nodes, bool), max_tokens + 1
    for leaf in tree.leaf_order.tolist():
        new, node = [], int(tree.leaf_node[leaf])
        while node >= 0 and not used[node]:
            new.append(node)
            node = int(tree.parent[node])
        added = int(tree.length[new].sum())
        if size + added > max_tokens:
            groups.append([])
            used[:] = False
            size, new, node = 0, [], int(tree.leaf_node[leaf])
            while node >= 0:
                new.append(node)
                node = int(tree.parent[node])
            added = int(node_end[tree.leaf_node[leaf]])
        groups[-1].append(leaf)
        used[new] = True
        size += added
    out = []
    for group in groups:
        keep = np.isin(everything, group)
        part = tree.without_leaves(~keep)
        assert part is not None
        out.append((part, everything[keep]))
    return out


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
