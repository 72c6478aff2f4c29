"""TreeBatch: packed trees on the device, as rows to compute and targets to score.

A *row* is a distinct prefix of token ids (`rows.py`). A *target* is one token of a tree after its prompt, with what was
recorded of it: the row that predicts it, and its id. Siblings that sampled one id with different records are different
targets of one row. Targets follow the order of the trees' tokens, so target ``i`` lies on the path of target ``j`` iff
``i <= j < target_end[i]``, the interval rule of rows.

A target shared by several leaves carries their sums (S_pos, S_neg, S_1). These add up over disjoint sets of leaves, so
a tree larger than the budget can be split by its leaves without changing loss or gradient.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from rolltree.kernels import HeadPlan, Objective, PathIndex, PolicyFields
from rolltree.kernels.tree_recurrence import RecurrencePlan, find_segments

from ..data.columns import Array
from ..data.media import Media
from ..data.paths import response_pairs
from ..data.tree import TokenTree
from .device import to_device
from .pieces import Piece
from .recurrence import Recurrence
from .rows import concat_rows, distinct_rows, rows_of_all

FIELDS = frozenset(f.name for f in fields(PolicyFields))
"""Columns of these names reach the kernels unchanged."""

SEQUENCE_WEIGHT = "sequence_weight"
"""Column of leaves: the weight of a sequence in means over sequences, 1 / chains of its episode; that of a term with a
selection has the term's name after a slash."""

OldLogprob = Tensor | Literal["behaviour", "proximal"] | None
"""The log-probs that ratios compare with: a tensor ``[M]``, a recorded column, or None for ratio 1."""


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Packed trees: ``T`` rows, ``M`` targets, ``R`` rows that predict a target, ``L`` leaves.

    The responses ``7 8`` and ``7 9 4`` to the prompt ``5 6`` are a tree of two leaves, with six rows and four targets.
    Row 3, of token 8, ends the first response, and no other row sees it; row 2, of token 7, predicts two targets::

        input_ids      5 6 7 8 9 4
        position_ids   0 1 2 3 3 4
        subtree_end    6 6 6 4 6 6
        target         7 8 9 4
        row            1 2 2 4
        target_end     4 2 4 4
        leaf_target    1 3
    """

    trees: tuple[TokenTree, ...]  # empty for a filler of `distribute`, which has no token in the loss
    tree_index: tuple[int, ...]  # each tree's index in the list given to pack()
    leaf_index: tuple[Array, ...]  # each tree's leaves, as indices in the tree given to pack()
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    subtree_end: Tensor  # [T] int32
    row: Tensor  # [M] int64, the row that predicts the target
    target: Tensor  # [M] int64
    head_row: Tensor  # [R] int64, distinct rows among `row`, ascending; a row once for each temperature of its targets
    head_index: Tensor  # [M] int64, row == head_row[head_index]
    loss_mask: Tensor  # [M] bool
    columns: dict[str, Tensor]  # those that training reads: of tokens and nodes [M], of leaves [L], of paths [P]
    target_end: Tensor  # [M] int64
    leaf_target: Tensor  # [L] int64, the last target on the leaf's path, -1 for an empty response
    leaf_start: Tensor | None  # [L] int64, the last target before the leaf's response, -1 for none; None: none anywhere
    leaf_length: Tensor  # [L] int64, response tokens in the loss
    segment: Tensor  # [M] int64, the target's node, among all nodes of the batch
    copies: Tensor  # [T] int64, leaves below: how often a flat batch would hold the row
    leaf_advantage: Tensor  # [L] float64; leaves in depth-first order, tree after tree
    mixed: bool  # some target is shared by leaves whose advantages differ in sign
    path_target: Tensor | None  # [P] int64, target of every response token of every leaf; None: no column needs it
    path_leaf: Tensor | None  # [P] int64, the leaf of each
    path_advantage: Tensor | None  # [P] float64, where credit differs along a path; None: it is the leaf's
    cu_seqlens: Tensor | None  # [trees + 1] int32, where every tree is a plain sequence
    longest: int  # tokens of the longest path
    padded: tuple[int, int] | None  # (B, S): plain sequences that the model computes as a padded batch [B, S]
    place: Tensor  # [T] int64, each row's place in that batch, flattened
    pieces: tuple[Piece, ...]  # of a tree larger than the budget, computed one after the other; empty: at once
    media: Media | None = None  # the pictures whose rows are among the batch's
    routes: Tensor | None = None  # [T, layers, k] int16, experts to replay, -1 for the router's own; None: not replayed
    of: int = 1  # micro-batches of the update, those of all ranks
    plan: HeadPlan | None = None  # of the terms' head pass; None: made when it runs. Pieces have their own

    def to(self, device: torch.device | str) -> TreeBatch:
        """The batch with its tensors on ``device``; batches can wait in host memory."""
        without = replace(self, trees=(), leaf_index=())
        return replace(to_device(without, device), trees=self.trees, leaf_index=self.leaf_index)

    def without_routes(self) -> TreeBatch:
        """The batch for a model that routes by itself, such as a reference."""
        return self if self.routes is None else replace(self, routes=None)

    @property
    def behaviour_logprob(self) -> Tensor | None:  # [M] float32
        """The log-probs that the sampler recorded; None if a token in the loss has none."""
        return self.columns.get("behaviour_logprob")

    def temperatures(self, default: float) -> float | Tensor:  # [M] float32
        """The temperature at which each target was sampled; one number if it is that of all.

        Args:
            default: temperature of the targets that were not sampled, or greedily. Call it while the batch is in the
                host's memory.
        """
        recorded = self.columns.get("temperature")
        if recorded is None:
            return default
        temperatures = torch.where(recorded > 0, recorded, default)  # NaN is not
        first = default if not len(temperatures) or (temperatures == default).all() else float(temperatures[0])
        return first if (temperatures == first).all() else temperatures

    @property
    def num_tokens(self) -> int:
        """Rows: distinct prefixes, those of prompts included."""
        return self.input_ids.numel()

    @property
    def num_leaves(self) -> int:
        return self.leaf_target.numel()

    @property
    def loss_tokens(self) -> int:
        """Response tokens in the loss, counted once a leaf: the normaliser of ``token_mean``."""
        return sum(tree.loss_tokens for tree in self.trees)

    def _pairs(self) -> dict[str, Tensor | None]:
        """Target, leaf and own credit of every response token of every leaf, for `PathIndex`."""
        if self.path_target is None or self.path_leaf is None:
            pairs = {name: torch.from_numpy(v).to(self.target.device) for name, v in response_pairs(self.trees).items()}
            return {"pair_target": pairs["path_target"], "pair_leaf": pairs["path_leaf"]}
        credit = None if self.path_advantage is None else self.path_advantage.float()
        return {"pair_target": self.path_target, "pair_leaf": self.path_leaf, "pair_advantage": credit}

    def paths(self, weight: Tensor | None = None, length: Tensor | None = None, *, pairs: bool = False) -> PathIndex:
        """The index of the targets on each leaf's path.

        Args:
            weight: ``[L]`` weight of each leaf; default: 1.
            length: ``[L]`` tokens of each leaf that count; default: those in the loss.
            pairs: tell the target of every response token of every leaf too.
        """
        one = self.leaf_advantage.new_ones(self.num_leaves) if weight is None else weight
        of_pairs = self._pairs() if pairs else {}
        return PathIndex(
            **of_pairs,
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
        old_logprob: OldLogprob = None,  # [M]
        ref_logprob: Tensor | None = None,  # [M]
        select: str | None = None,
    ) -> PolicyFields:
        """The inputs of :func:`rolltree.kernels.policy_loss` for every target, exact for shared tokens.

        A leaf's weight is 1, or 1 / (its tokens in the loss) for ``seq_mean_token_mean``; in all means over sequences,
        times the column `SEQUENCE_WEIGHT`.

        Args:
            normalizer: divides the weights; ``policy_loss`` is then called with normalizer 1.
            old_logprob: log-probs that ratios compare with: a tensor, the sampler's ("behaviour"), those of the column
                ``proximal_logprob`` ("proximal"), or None for a single on-policy update (ratio 1).
            ref_logprob: replaces the column of that name.
            select: name of a loss term; its selection replaces ``loss_mask``.

        Raises:
            ValueError: ``old_logprob`` is another name, or it names a column of which a token in the loss has no value
                although the objective needs it.
        """
        mask, length, weight, share = self._selected(select)
        columns = {name: values for name, values in self.columns.items() if name in FIELDS}
        if isinstance(old_logprob, str):
            old_logprob = self._recorded(old_logprob, needed=objective.needs_old)
        if ref_logprob is not None:
            columns["ref_logprob"] = ref_logprob
        if share is None and select is not None and "token_weight" in objective.needs:
            share = torch.ones_like(self.loss_mask, dtype=torch.float32)  # its leaves carry the selection
        if share is not None:
            columns["token_weight"] = share
        if objective.aggregation.startswith("seq_mean"):
            of_episodes = self.columns.get(SEQUENCE_WEIGHT if select is None else f"{SEQUENCE_WEIGHT}/{select}")
            weight = weight if of_episodes is None else weight * of_episodes
        if objective.aggregation == "seq_mean_token_mean":
            weight = weight / length.clamp(min=1)
        if normalizer is not None:
            weight = weight / normalizer
        finer = self.path_advantage is not None or share is not None or objective.token_mismatch != "none"
        paths = self.paths(weight, length, pairs=objective.scope == "path" and finer)
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
            **columns,
        )

    def check_whole(self, term: str) -> None:
        """Check that the batch holds whole trees, for the loss term called ``term``.

        Raises:
            ValueError: a tree was split at its leaves.
        """
        for tree, index in zip(self.trees, self.leaf_index, strict=True):
            if not torch.equal(torch.as_tensor(index), torch.arange(tree.num_leaves)):
                raise ValueError(f"The loss term '{term}' needs whole trees; pack them with in_pieces=True.")

    def _recorded(self, old_logprob: str, needed: bool) -> Tensor | None:  # [M]
        """The column that ``old_logprob`` names; None if it is incomplete and not needed."""
        if old_logprob not in ("behaviour", "proximal"):
            raise ValueError(f"old_logprob must be 'behaviour', 'proximal', a tensor or None, got '{old_logprob}'.")
        recorded = self.columns.get(f"{old_logprob}_logprob")
        if recorded is None and needed and bool(self.loss_mask.any()):
            raise ValueError(
                f"A token in the loss has no recorded log-prob ({old_logprob}_logprob); give old_logprob, or None "
                "for a single on-policy update."
            )
        return recorded

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
        """Return ``values`` summed at each target over the leaves below it, in a fixed order."""
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


_recurrences: weakref.WeakKeyDictionary[TreeBatch, Recurrence] = weakref.WeakKeyDictionary()


def recurrence_of(batch: TreeBatch) -> Recurrence:
    """Return the recurrence of a batch of whole trees; its plan is made once, from its trees, if any, on the host."""
    if batch not in _recurrences:
        if not batch.trees:
            end = batch.subtree_end.cpu().numpy()
        else:
            rows = concat_rows([distinct_rows(tree) for tree in batch.trees])
            end = (rows if rows.num_rows == batch.num_tokens else rows_of_all(batch.trees)).end
        _recurrences[batch] = Recurrence(RecurrencePlan.make(find_segments(end), device=batch.input_ids.device))
    return _recurrences[batch]
