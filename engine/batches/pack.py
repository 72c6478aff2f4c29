"""Packing: `pack` chooses the trees, parts of trees or leaves of each batch, `assemble` makes its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import checks
from ..data.columns import COLUMNS, Array
from ..data.concat import side_by_side
from ..data.media import FIRST_ID, Media
from ..data.paths import CREDIT, depth_first, has_credit, response_pairs
from ..data.segment import Origin
from ..data.tree import TokenTree
from .batch import TreeBatch
from .cost import CostModel
from .pieces import cut
from .rows import Rows, concat_rows, distinct_rows, head_rows, rows_of_all

WORTH_SHARING = 1.1
"""A tree is computed as a tree if the flat batch needs at least this many times its FLOP, and trees below one beginning
if apart they have this many times the rows."""


class Part(NamedTuple):
    """A tree of the list given to `pack`, or some of its leaves."""

    tree_index: int  # in that list
    tree: TokenTree
    leaf_index: Array  # [L] the part's leaves, as indices in the tree given to `pack`
    rows: Rows


def pack(
    trees: Sequence[TokenTree],
    *,
    max_tokens: int,
    device: torch.device | str | None = None,
    in_pieces: bool = False,
    flat: bool = False,
    unshare: CostModel | None = None,
    replay_routes: bool = False,
) -> list[TreeBatch]:
    """Pack trees into batches of at most ``max_tokens`` rows: distinct prefixes, whatever was recorded of their tokens.

    Trees stay whole and go to the fullest batch they fit (best-fit decreasing; deterministic). A larger tree is split
    by its leaves, each part repeating the ancestors it needs; losses and gradients of the parts add up to the tree's.
    Prompts that begin alike, with one system prompt, tools or worked examples, are computed below one beginning where
    that saves a tenth of all rows, and go to the batch with the most rows in common.

    Args:
        max_tokens: rows a batch, or a piece, may have.
        device: where the tensors are made; default: the host.
        in_pieces: a larger tree becomes a batch of its own, to be computed in pieces of ``max_tokens`` that repeat
            nothing (:func:`rolltree.engine.backward`, :func:`batch_logprob`); a single path may then be longer.
        flat: nothing is shared. Every leaf is a sequence of its own, in ordinary padded batches of at most
            ``max_tokens`` places without tree attention, for models whose layers no tree mask fits.
        unshare: trees that save less than a tenth of the flat batch's FLOP are packed as plain sequences, apart from
            the others, for an attention kernel that is faster on those.
        replay_routes: a mixture of experts computes each token with the experts of the column ``routes``. Tokens
            without a record go where the router sends them: given ones, and the last one of a response.

    Raises:
        ValueError: one root-to-leaf path exceeds ``max_tokens`` without ``in_pieces``; ``max_tokens`` is below 1; a
            tree lacks a picture whose rows it holds, or is to be ``flat`` and has pictures; or routes are to be
            replayed, and a tree of sampled responses has none.
    """
    checks.all_of("trees", trees, TokenTree)
    checks.size("max_tokens", max_tokens)
    if flat and any(tree.pictures for tree in trees):
        raise ValueError("Trees with pictures are computed as trees only; pack them without flat.")
    if flat:
        return _pack_flat(trees, max_tokens, device, replay_routes)
    parts: list[Part] = []
    oversized: list[TreeBatch] = []
    for index, tree in enumerate(trees):
        whole = Part(index, tree, np.arange(tree.num_leaves), distinct_rows(tree))
        if in_pieces and whole.rows.num_rows > max_tokens:
            oversized.append(replace(assemble([whole], device, replay_routes), pieces=cut(tree, max_tokens, device)))
        else:
            parts.extend(_split(whole, max_tokens))
    plain: list[Part] = []
    if unshare is not None:
        losing = [unshare.flat(part.tree) < WORTH_SHARING * unshare.shared(part.tree) for part in parts]
        plain = [leaf for part, loses in zip(parts, losing, strict=True) if loses for leaf in _sequences(part)]
        parts = [part for part, loses in zip(parts, losing, strict=True) if not loses]
    common = _common(parts)
    fitted = [assemble(p, device, replay_routes, common is None) for p in _best_fit(parts, max_tokens, common)]
    return oversized + fitted + [assemble(p, device, replay_routes) for p in _best_fit(plain, max_tokens)]


def _part(index: int, tree: TokenTree, leaves: Array) -> Part:
    return Part(index, tree, leaves, distinct_rows(tree))


def _sequences(part: Part) -> list[Part]:
    """Every leaf of ``part`` as a part of its own."""
    tree = part.tree
    return [_part(part.tree_index, tree.chain(i), part.leaf_index[i : i + 1]) for i in range(tree.num_leaves)]


def _common(parts: Sequence[Part]) -> list[Array] | None:  # [rows that others have too] int64 each
    """Return, for each part, numbers of the prefixes that other parts have too; None where too few are common."""
    apart = sum(part.rows.num_rows for part in parts)
    if len(parts) < 2:
        return None
    rows = rows_of_all([part.tree for part in parts])
    if apart < WORTH_SHARING * rows.num_rows:
        return None
    bounds = np.cumsum([0, *(part.tree.num_tokens for part in parts)])
    of_parts = [np.unique(rows.of_token[begin:end]) for begin, end in pairwise(bounds)]
    repeated = np.bincount(np.concatenate(of_parts), minlength=rows.num_rows) > 1
    number = np.cumsum(repeated) - 1
    return [number[of_part[repeated[of_part]]] for of_part in of_parts]


def _best_fit(parts: Sequence[Part], max_tokens: int, common: list[Array] | None = None) -> list[list[Part]]:
    """Return the parts of each batch, in their order. Prefixes that several of them have in ``common`` count once."""
    of_parts = common or [np.zeros(0, np.int64)] * len(parts)
    prefixes = 1 + max((int(numbers.max()) for numbers in of_parts if len(numbers)), default=-1)
    bins: list[list[int]] = []
    room: list[int] = []
    held: list[Array] = []  # [prefixes] bool for each batch: the prefixes in it
    for i in sorted(range(len(parts)), key=lambda i: (-parts[i].rows.num_rows, i)):
        size, numbers = parts[i].rows.num_rows, of_parts[i]
        there = [int(holds[numbers].sum()) for holds in held]
        fitting = [b for b in range(len(bins)) if room[b] >= size - there[b]]
        if fitting:
            best = min(fitting, key=lambda b: (-there[b], room[b]))
        else:
            bins, room, held = [*bins, []], [*room, max_tokens], [*held, np.zeros(prefixes, bool)]
            there, best = [*there, 0], len(bins) - 1
        bins[best].append(i)
        room[best] -= size - there[best]
        held[best][numbers] = True
    return [[parts[i] for i in sorted(members)] for members in bins]


def _pack_flat(
    trees: Sequence[TokenTree], max_tokens: int, device: torch.device | str | None, replay_routes: bool
) -> list[TreeBatch]:
    """Batches of single leaves, longest first, each padded to its longest."""
    leaves = [
        (index, leaf, int(length)) for index, tree in enumerate(trees) for leaf, length in enumerate(tree.path_length)
    ]
    leaves.sort(key=lambda entry: -entry[2])
    batches: list[TreeBatch] = []
    while leaves:
        index, leaf, longest = leaves[0]
        if longest > max_tokens:
            raise ValueError(_too_long(leaf, index, longest, max_tokens))
        taken, leaves = leaves[: max_tokens // longest], leaves[max_tokens // longest :]
        batch = assemble([_part(i, trees[i].chain(j), np.array([j])) for i, j, _ in taken], device, replay_routes)
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


def _split(whole: Part, max_tokens: int) -> list[Part]:
    """Parts of ``whole`` of at most ``max_tokens`` rows, each with consecutive leaves in depth-first order of rows."""
    tree, rows = whole.tree, whole.rows
    if rows.num_rows <= max_tokens:
        return [whole]
    path = tree.path_length
    if path.max() > max_tokens:
        worst = int(path.argmax())
        raise ValueError(_too_long(worst, whole.tree_index, int(path[worst]), max_tokens))
    last = rows.of_token[tree.row_at(path - 1)]  # the row in which each leaf ends
    order = np.argsort(last, kind="stable")
    groups: list[list[int]] = []
    size, before = max_tokens + 1, -1
    for leaf, row in zip(order.tolist(), last[order].tolist(), strict=True):
        # a leaf adds its rows below those that it shares with the one before it
        added = int(rows.position[row] - rows.position[before + 1 : row + 1].min(initial=rows.position[row] + 1)) + 1
        if size + added > max_tokens:
            groups.append([])
            size, added = 0, int(path[leaf])
        groups[-1].append(leaf)
        size, before = size + added, row
    parts = []
    for group in groups:
        drop = np.ones(tree.num_leaves, bool)
        drop[group] = False
        part = tree.without_leaves(drop)
        assert part is not None
        parts.append(_part(whole.tree_index, part, whole.leaf_index[~drop]))
    return parts


def assemble(
    parts: Sequence[Part], device: torch.device | str | None, replay_routes: bool = False, apart: bool = True
) -> TreeBatch:
    """``parts`` as one batch: a row for every distinct prefix of a part, or unless ``apart`` of all parts, and a target
    for every token after a part's prompt."""
    trees = [part.tree for part in parts]
    all_of = side_by_side(trees)
    rows = concat_rows([part.rows for part in parts]) if apart else rows_of_all(trees)
    node = np.repeat(np.arange(all_of.num_nodes), all_of.length)
    response = all_of.parent[node] >= 0
    before = np.append(0, np.cumsum(response))  # targets before each token
    order = all_of.leaf_order
    row = rows.of_token[all_of.parent_row[response]]
    head_row, head_index = head_rows(row, all_of.temperature[response])
    loss_mask = (all_of.loss_mask & (all_of.response_leaves > 0))[response]
    input_ids, target = all_of.token_id[rows.token], all_of.token_id[response]
    media = Media.of(input_ids, rows.position, rows.end, all_of.pictures, device)
    target = target if media is None else _within_vocabulary(target, loss_mask)
    copies = np.bincount(rows.of_token, weights=(all_of.last_leaf - all_of.first_leaf + 1)[node])
    bounds = np.cumsum([0, *(tree.num_tokens for tree in trees)])
    plain = all(tree.num_leaves == 1 for tree in trees) and rows.num_rows == bounds[-1]

    def target_of(token: Array) -> Array:
        return np.where(response[token], before[token], -1)

    def tensor(values: Array, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device)

    leaf_start = target_of(all_of.row_at(all_of.leaf_prompt - 1)[order])
    paths = response_pairs(trees, all_of) if any(_along_paths(tree) for tree in trees) else {}
    along = {name: torch.from_numpy(values).to(device) for name, values in paths.items()}
    return TreeBatch(
        trees=tuple(trees),
        tree_index=tuple(part.tree_index for part in parts),
        leaf_index=tuple(part.leaf_index for part in parts),
        input_ids=tensor(input_ids),
        position_ids=tensor(rows.position),
        subtree_end=tensor(rows.end, np.int32),
        row=tensor(row),
        target=tensor(target),
        head_row=tensor(head_row),
        head_index=tensor(head_index),
        loss_mask=tensor(loss_mask, np.bool_),
        columns={name: torch.from_numpy(values).to(device) for name, values in _columns(all_of, response, loss_mask)},
        target_end=tensor(before[all_of.subtree_end[response]]),
        leaf_target=tensor(target_of(all_of.row_at(all_of.path_length - 1)[order])),
        leaf_start=tensor(leaf_start) if (leaf_start >= 0).any() else None,
        leaf_length=tensor(all_of.loss_length[order]),
        segment=tensor(node[response]),
        copies=tensor(copies),
        leaf_advantage=tensor(all_of.advantage[order], np.float64),
        mixed=any(has_credit(tree) and tree.num_leaves > 1 for tree in trees) or _mixed(all_of),
        path_target=along.get("path_target"),
        path_leaf=along.get("path_leaf"),
        path_advantage=along.get("path_advantage"),
        cu_seqlens=tensor(bounds, np.int32) if plain else None,
        longest=int(all_of.path_length.max()),
        padded=None,
        place=torch.arange(rows.num_rows, device=device),
        pieces=(),
        media=media,
        routes=torch.from_numpy(_routes(trees, all_of)[rows.token]).to(device) if replay_routes else None,
    )


def _within_vocabulary(target: Array, loss_mask: Array) -> Array:  # [M] int64, [M] bool -> [M] int64
    """``target`` with 0 for the rows of pictures, which no loss may count."""
    of_picture = target >= FIRST_ID
    if (of_picture & loss_mask).any():
        raise ValueError("A picture's rows are in the loss; only tokens of the vocabulary can be trained on.")
    return np.where(of_picture, 0, target)


def _routes(trees: Sequence[TokenTree], all_of: TokenTree) -> Array:  # [T, layers, k] int16
    """Return the recorded routes of all tokens, to be replayed.

    Raises:
        ValueError: a tree of sampled responses has none.
    """
    for tree in trees:
        if "routes" not in tree.columns and (tree.origin == Origin.SAMPLED).any():
            raise ValueError(
                "Routes are to be replayed, and rollouts have no column 'routes'; sample them with EngineConfig("
                "record_routes=True), or replay none (model.replay_routes = false)."
            )
    return all_of.routes


def _along_paths(tree: TokenTree) -> bool:
    """Tell if ``tree`` has values for every response token of every leaf."""
    return any(COLUMNS[name].to_device and COLUMNS[name].per == "path" for name in tree.columns) or has_credit(tree)


def _columns(all_of: TokenTree, response: Array, loss_mask: Array) -> Iterator[tuple[str, Array]]:
    """The columns that training reads, except token columns that are NaN for a token in the loss."""
    for name, values in all_of.columns.items():
        column = COLUMNS[name]
        if not column.to_device or name in ("advantage", *CREDIT):
            continue
        if column.per == "leaf":
            yield name, values[all_of.leaf_order]
        elif column.per == "path":
            yield name, values[depth_first(all_of)]
        else:
            values = (values if column.per == "token" else np.repeat(values, all_of.length))[response]
            if not (values.dtype.kind == "f" and np.isnan(values[loss_mask]).any()):
                yield name, values


def _mixed(tree: TokenTree) -> bool:
    """Tell if leaves of one node below a prompt differ in the sign of their advantage."""
    sign = np.sign(tree.advantage)[tree.leaf_order]
    changes = np.append(0, np.cumsum(sign[1:] != sign[:-1]))
    below = tree.parent >= 0
    return bool((changes[tree.last_leaf[below]] != changes[tree.first_leaf[below]]).any())
