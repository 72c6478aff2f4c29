"""TreeBatch: trees packed back to back into a token budget, on the device.

A *target* is one response token to score: its predictor's row and its id. Targets follow the packed order of their
tokens, so target ``i`` lies on the path of target ``j`` iff ``i <= j < target_end[i]``, the same interval rule as for
rows. A token shared by several leaves is one target that carries their sums (S_pos, S_neg, S_1); those sums add up over
disjoint sets of leaves, which is why a tree larger than the budget can be split by its leaves without changing loss or
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import HeadPlan, Objective, PathIndex, PolicyFields

from . import checks
from .columns import COLUMNS, Array
from .cost import CostModel
from .device import to_device
from .pieces import Piece, cut
from .side_by_side import side_by_side
from .tree import TokenTree

FIELDS = frozenset(f.name for f in fields(PolicyFields))
"""Columns of these names reach the kernels as they are."""
WORTH_SHARING = 1.1
"""FLOP of the flat batch over those of the tree, from which on a tree is computed as one."""


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Packed trees. ``T`` tokens, ``M`` targets, ``R`` rows whose hidden state predicts something, ``L`` leaves."""

    trees: tuple[TokenTree, ...]
    tree_index: tuple[int, ...]  # of each tree, in the list given to pack()
    leaf_index: tuple[Array, ...]  # of each tree's leaves, in the tree given to pack()
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    subtree_end: Tensor  # [T] int32
    row: Tensor  # [M] int64, the packed row that predicts the target
    target: Tensor  # [M] int64
    head_row: Tensor  # [R] int64, distinct rows among `row`, ascending
    head_index: Tensor  # [M] int64, row == head_row[head_index]
    loss_mask: Tensor  # [M] bool
    columns: dict[str, Tensor]  # of tokens and nodes [M], of leaves [L], of paths [P]; those training reads
    target_end: Tensor  # [M] int64
    leaf_target: Tensor  # [L] int64, the last target on the leaf's path, -1 for an empty response
    leaf_start: Tensor | None  # [L] int64, the last target before the leaf's response, -1 for none; None: none anywhere
    leaf_length: Tensor  # [L] int64, response tokens in the loss
    segment: Tensor  # [M] int64, the target's node, among all nodes of the batch
    copies: Tensor  # [T] int64, leaves below: how often a flat batch would hold the token
    leaf_advantage: Tensor  # [L] float64; leaves in depth-first order, tree after tree
    mixed: bool  # some token is shared by leaves whose advantages differ in sign
    path_target: Tensor | None  # [P] int64, the target of each leaf's every response token; None: no column needs it
    path_leaf: Tensor | None  # [P] int64, that leaf
    path_advantage: Tensor | None  # [P] float64, where credit differs along a path; None: it is the leaf's
    cu_seqlens: Tensor | None  # [trees + 1] int32, where every tree is a plain sequence
    longest: int  # path, in tokens
    padded: tuple[int, int] | None  # (B, S): single sequences, which the model takes as an ordinary batch padded to S
    place: Tensor  # [T] int64, the token's place in that batch, read row by row
    pieces: tuple[Piece, ...]  # of a tree larger than the budget, to be computed one after the other; empty: at once
    plan: HeadPlan | None = None  # of its terms' head pass; None: made where it runs. Pieces have their own

    def to(self, device: torch.device | str) -> TreeBatch:
        """Its tensors on ``device``: batches can wait in the host's memory for their turn."""
        without = replace(self, trees=(), leaf_index=())
        return replace(to_device(without, device), trees=self.trees, leaf_index=self.leaf_index)

    @property
    def behaviour_logprob(self) -> Tensor | None:  # [M] float32
        """As recorded when the tokens were sampled; None where a token in the loss has none."""
        return self.columns.get("behaviour_logprob")

    @property
    def num_tokens(self) -> int:
        """Unique tokens, prompts included."""
        return self.input_ids.numel()

    @property
    def num_leaves(self) -> int:
        return self.leaf_target.numel()

    @property
    def loss_tokens(self) -> int:
        """Response tokens in the loss, counted once a leaf: the normaliser of ``token_mean``."""
        return sum(tree.loss_tokens for tree in self.trees)

    def paths(self, weight: Tensor | None = None, length: Tensor | None = None) -> PathIndex:
        """Which targets lie on which leaf's path.

        Args:
            weight: ``[L]`` of each leaf, 1 where not given.
            length: ``[L]`` tokens of each leaf that count; those in the loss where not given.
        """
        one = self.leaf_advantage.new_ones(self.num_leaves) if weight is None else weight
        return PathIndex(
            target_end=self.target_end,
            leaf_target=self.leaf_target,
            leaf_start=self.leaf_start,
            leaf_length=self.leaf_length if length is None else length,
            leaf_weight=one.float(),
            leaf_advantage=self.leaf_advantage.float() if self.path_advantage is None else None,
        )

    def fields(
        self,
        objective: Objective,
        *,
        normalizer: float | Tensor | None = None,
        old_logprob: Tensor | Literal["behaviour"] | None = None,  # [M]
        ref_logprob: Tensor | None = None,  # [M]
        select: str | None = None,
    ) -> PolicyFields:
        """What :func:`rolltree.kernels.policy_loss` needs of each target, exact for shared tokens.

        A leaf's weight is 1, or 1 / (its tokens in the loss) for ``seq_mean_token_mean``. With ``normalizer`` the
        weights are divided by it, and ``policy_loss`` is then called with normalizer 1.

        Args:
            old_logprob: as in :func:`rolltree.engine.batch_loss`.
            ref_logprob: in place of the column of that name.
            select: of a loss term, whose selection says what counts instead of ``loss_mask``.

        Raises:
            ValueError: ``old_logprob`` is "behaviour", the objective needs it, and a token in the loss has none.
        """
        mask, length, weight, share = self._selected(select)
        given = {name: values for name, values in self.columns.items() if name in FIELDS}
        if isinstance(old_logprob, str):
            if old_logprob != "behaviour":
                raise ValueError(f"old_logprob must be 'behaviour', a tensor or None, got '{old_logprob}'.")
            old_logprob = self.columns.get("proximal_logprob", self.behaviour_logprob)
            if old_logprob is None and objective.needs_old:
                raise ValueError(
                    "A token in the loss has no recorded log-prob to compare with; give old_logprob, or None for a "
                    "single on-policy update."
                )
        if ref_logprob is not None:
            given["ref_logprob"] = ref_logprob
        if share is None and select is not None and "token_weight" in objective.needs:
            share = torch.ones_like(self.loss_mask, dtype=torch.float32)  # its leaves carry the selection
        if share is not None:
            given["token_weight"] = share
        if objective.aggregation == "seq_mean_token_mean":
            weight = weight / length.clamp(min=1)
        if normalizer is not None:
            weight = weight / normalizer
        paths = self.paths(weight, length)
        weighed, credit, spread = weight, self.leaf_advantage, paths.spread
        if self.path_advantage is not None:
            assert self.path_leaf is not None
            weighed, credit, spread = weight[self.path_leaf], self.path_advantage, self.sum_paths
        signed = weighed * credit
        return PolicyFields(
            adv_pos=spread(signed.clamp(min=0)).float(),
            adv_neg=spread(signed.clamp(max=0)).float(),
            weight=paths.spread(weight).float(),
            mask=mask,
            old_logprob=old_logprob,
            pos_weight=spread(weighed * (credit > 0)).float() if self.mixed else None,
            neg_weight=spread(weighed * (credit < 0)).float() if self.mixed else None,
            segment=self.segment if objective.ratio_level == "segment" else None,
            paths=paths,
            aggregation=objective.aggregation,
            **given,
        )

    def _selected(self, select: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Mask ``[M]``, tokens ``[L]`` and weight ``[L]`` of each leaf, and the share ``[M]`` of each token, if any."""
        one = torch.ones_like(self.leaf_advantage)
        if select is None:
            return self.loss_mask, self.leaf_length, one, None
        of_leaves, of_tokens = (self.columns.get(f"select_{per}/{select}") for per in ("leaf", "token"))
        if of_leaves is not None and of_tokens is None:
            return self.loss_mask, self.leaf_length, of_leaves.double(), None
        if of_tokens is None:
            return torch.zeros_like(self.loss_mask), torch.zeros_like(self.leaf_length), 0 * one, None
        mask = of_tokens != 0
        return mask, self.paths().sum(mask.double()).long(), one, of_tokens

    def sum_paths(self, values: Tensor) -> Tensor:  # [P] -> [M]
        """At each target the sum of ``values`` over the leaves below it, in a fixed order."""
        assert self.path_target is not None
        return values.new_zeros(self.target.numel()).index_put((self.path_target,), values, accumulate=True)

    def to_leaves(self, values: Tensor) -> list[list[Tensor]]:  # [M, ...]
        """Per tree, per leaf (in leaf-index order), the response tokens' values in order."""
        out, first_target = [], 0
        for tree in self.trees:
            count = tree.num_tokens - tree.prompt_length
            shift = first_target - tree.prompt_length  # targets are the rows after the prompt, in order
            out.append(
                [
                    values[torch.from_numpy(tree.response_rows(leaf) + shift).to(values.device)]
                    for leaf in range(tree.num_leaves)
                ]
            )
            first_target += count
        return out


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
            whole = _assemble([(index, tree, np.arange(tree.num_leaves))], device)
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
    return [_assemble([parts[i] for i in sorted(members)], device) for members in bins]


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
        batch = _assemble([(i, trees[i].chain(j), np.array([j])) for i, j, _ in taken], device)
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


def _assemble(parts: list[tuple[int, TokenTree, Array]], device: torch.device | str | None) -> TreeBatch:
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


CREDIT = ("token_advantage", "node_advantage", "path_advantage")
"""Columns of credit finer than a leaf's."""


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
