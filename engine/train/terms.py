"""Loss terms: the summands of an update's loss, which share one forward of the model and one pass of its head.

A term has its own selection (weights of the leaves or tokens that it counts), weight and global normaliser. The trainer
executes terms and contains no algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rolltree.kernels import LogprobTerm, Objective, Term, pair_loss

from ..batches.batch import SEQUENCE_WEIGHT, TreeBatch
from ..data.columns import COLUMNS, Array, Column, declare
from ..data.cut import cut
from ..data.episodes import Episodes, count, shares
from ..data.paths import has_credit, last_marked, path_credit
from ..data.segment import Origin
from ..data.tree import TokenTree
from ..errors import UserError
from ..model.losses.distillation import AnyTerm
from ..parts.calling import call
from ..parts.context import now

Selection = Callable[[TokenTree], Array]
"""Returns weights of a tree's leaves ``[L]`` or tokens ``[T]``; those of weight 0 are not part of the term.

A method ``prepare(trees)`` of it is called first, once a step, with all groups and demonstrations.
"""
Pairing = Callable[[TokenTree], Sequence[tuple[int, int]]]
"""Returns pairs (chosen, rejected) of a tree's leaves."""


class LossTerm(Protocol):
    """The interface of a term that the learner and the trainer use."""

    @property
    def name(self) -> str:
        """Prefix of the term's metrics; with "actor" their names stay as they are."""

    @property
    def whole_trees(self) -> bool:
        """True if its loss relates responses of one tree, which must then be packed together."""

    def now(self) -> LossTerm:
        """Return the term with the options of the step in progress.

        Raises:
            UserError: an option that changes with the step has left its range.
        """

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        """Store on the trees which parts of them the term counts, before they are packed.

        Raises:
            UserError: the user's selection or pairs do not fit a tree.
        """

    @property
    def whole_batch(self) -> bool:
        """True if its loss reads more of a batch than the tokens of :meth:`extent`, which must then not be cut."""

    def extent(self, tree: TokenTree) -> Array:  # [L]
        """Return the tokens of each response up to the last one that the gradient of this term needs; 0: none.

        The tree is prepared and has credit.
        """

    def has_gradient(self, tree: TokenTree) -> bool:
        """Return True if :meth:`extent` is not 0 everywhere."""

    def keep_means(self, tree: TokenTree, part: TokenTree, kept: Array) -> None:
        """Keep the weights of responses in means over their tokens.

        Args:
            tree: a prepared tree.
            part: the tree without ends of responses.
            kept: the leaves of ``tree`` that ``part`` has, in its order.
        """

    def normalizer(self, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree] = ()) -> float:
        """Return the divisor of the term's sum over rollouts and ``demonstrations``; 0: the term counts none."""

    def on(self, batch: TreeBatch, normalizer: float, on_policy: bool, weight: float) -> AnyTerm:
        """Return the term of a batch, on its device; if ``on_policy``, its weights sampled it and the ratio is 1."""


@dataclass(frozen=True)
class TokenTerm:
    """A term of an objective that is a sum over tokens: a policy loss, or an NLL, a KL or an entropy alone.

    Args:
        select: weights of the leaves or tokens that it counts; None: every token in the loss.
        changed: makes the objective of each step, where options of it change with the step.
        length_limit: of a response in tokens, for the aggregation ``seq_mean_token_sum_norm``.
    """

    objective: Objective
    name: str = "actor"
    select: Selection | None = None
    length_limit: int = 1
    changed: Callable[[], Objective] | None = None
    whole_trees = False

    def now(self) -> TokenTerm:
        return self if self.changed is None else replace(self, objective=self.changed())

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        if "pass_rate" in self.objective.needs_fields:
            for tree in (tree for tree in trees if "reward" in tree.rewards):
                tree.set("pass_rate", float(Episodes(tree).tree.rewards["reward"].mean()))
        if self.select is not None:
            self._choose(self.select, trees)
        for tree in (tree for tree in trees if "episode" in tree.names):
            tree.set(_weight_column(self.name, self.select).name, shares(tree, self.lengths(tree) > 0))

    def _choose(self, select: Selection, trees: Sequence[TokenTree]) -> None:
        """Write the weights of the selection to the trees."""
        responses = [Episodes(tree) for tree in trees]
        if hasattr(select, "prepare"):
            call(
                f"The selection of the loss term '{self.name}'",
                select.prepare,
                [episodes.tree for episodes in responses],
            )
        for tree, episodes in zip(trees, responses, strict=True):
            weights = np.asarray(select(episodes.tree), np.float32)
            per = "token" if weights.shape == (episodes.tree.num_tokens,) else "leaf"
            weights = episodes.tokens(weights) if per == "token" else episodes.leaves(weights)
            if per == "token":
                weights = np.where(tree.response_leaves > 0, weights, 0)
            try:
                tree.set(_selection_column(self.name, per).name, weights)
            except ValueError as error:
                raise UserError(f"The selection of the loss term '{self.name}': {error}") from error
            if "token_weight" in self.objective.needs and self.objective.mismatch != "none":
                self._check_recorded(tree)

    def _check_recorded(self, tree: TokenTree) -> None:
        """Refuse to weigh given tokens by the log-probs of the policy that wrote them if these are not known.

        Raises:
            UserError: a token that counts has no log-prob.
        """
        of_token, of_leaf = (tree.columns.get(f"select_{per}/{self.name}") for per in ("token", "leaf"))
        chosen = np.zeros(tree.num_tokens, bool) if of_token is None else of_token != 0
        if of_leaf is not None:
            chosen[tree.path_tokens[np.repeat(of_leaf != 0, tree.response_length)]] = True
            chosen &= tree.loss_mask
        if unknown := int(np.isnan(tree.behaviour_logprob[chosen]).sum()):
            raise UserError(
                f"The loss term '{self.name}' weighs tokens by the log-probs of the policy that wrote them, and "
                f"{unknown} of {int(chosen.sum())} tokens of a response have none; name their column in "
                "demonstrations.logprob_key, or choose the objective 'sft'."
            )

    @property
    def whole_batch(self) -> bool:
        return self.objective.aggregation == "batch_token_mean" or self.objective.scope == "batch"

    def extent(self, tree: TokenTree) -> Array:  # [L]
        objective, counted = self.objective, self.lengths(tree) > 0
        chosen = tree.columns.get(f"select_token/{self.name}") if self.select is not None else None
        live = (tree.loss_mask if chosen is None else chosen != 0)[tree.path_tokens]
        live &= np.repeat(counted, tree.response_length)
        if not self._of_all:
            live &= self._moves(path_credit(tree))
        last = last_marked(tree, live)
        return last if objective.scope == "token" else np.where(last > 0, tree.response_length, 0)

    def has_gradient(self, tree: TokenTree) -> bool:
        if self.select is not None or has_credit(tree):
            return bool(self.extent(tree).any())
        counted = tree.loss_length > 0  # no token of the tree is read, which may be stored elsewhere
        return bool((counted if self._of_all else counted & self._moves(tree.advantage)).any())

    @property
    def _of_all(self) -> bool:
        """True if tokens without credit have a gradient."""
        return bool(self.objective.kl_coef or self.objective.entropy_coef or self.objective.formula.of_all)

    def _moves(self, credit: Array) -> Array:
        return ((credit > 0) & (self.objective.pos_weight != 0)) | ((credit < 0) & (self.objective.neg_weight != 0))

    def keep_means(self, tree: TokenTree, part: TokenTree, kept: Array) -> None:
        if self.objective.aggregation != "seq_mean_token_mean":
            return
        before, after = self.lengths(tree)[kept], self.lengths(part)
        if not np.array_equal(before, after):  # a batch divides by the tokens that it has
            column = _weight_column(self.name, self.select).name
            part.set(column, getattr(part, column) * (after / np.maximum(before, 1)))

    def normalizer(self, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree] = ()) -> float:
        seen = trees if self.select is None else [*trees, *demonstrations]
        lengths = [self.lengths(tree) for tree in seen]
        leaves = sum(count(tree, length >= 0) for tree, length in zip(seen, lengths, strict=True))
        aggregation = self.objective.aggregation
        if aggregation == "token_mean":
            return float(sum(int(length.clip(min=0).sum()) for length in lengths))
        if aggregation == "token_sum":
            return 1.0
        if aggregation == "batch_token_mean":  # `on` knows the tokens
            return float(any((length > 0).any() for length in lengths))
        return float(leaves * (self.length_limit if aggregation == "seq_mean_token_sum_norm" else 1))

    def lengths(self, tree: TokenTree) -> Array:  # [L]
        """Return the number of counted tokens of each leaf; -1 for a leaf that is not counted."""
        for per in ("leaf", "token"):
            name = f"select_{per}/{self.name}"
            if self.select is not None and name in tree.columns:
                chosen = tree.columns[name] != 0
                if per == "leaf":
                    return np.where(chosen, tree.loss_length, -1)
                length = tree.count_along(chosen)
                return np.where(length > 0, length, -1)
        return tree.loss_length if self.select is None else np.full(tree.num_leaves, -1)

    def on(self, batch: TreeBatch, normalizer: float, on_policy: bool, weight: float) -> Term:
        old = None if on_policy else self.compared_with(batch)
        select = None if self.select is None else self.name
        fields = batch.fields(self.objective, old_logprob=old, select=select)
        ref = fields.ref_logprob
        if ref is not None and not self.objective.kl_coef and bool(ref[fields.mask].isnan().any()):
            fields = replace(fields, ref_logprob=None)  # demonstrations have none, and the metric would be NaN
        if self.objective.aggregation == "batch_token_mean":
            assert fields.paths is not None
            normalizer = max(float(fields.paths.leaf_length.sum()), 1.0) * batch.of
        return Term(fields, self.objective, normalizer, weight, self.name)

    def compared_with(self, batch: TreeBatch) -> Literal["behaviour", "proximal"]:
        """Return the column of old log-probs: the proximal policy's if it was scored, unless the objective is defined
        against the sampler."""
        scored = any("proximal_logprob" in tree.columns for tree in batch.trees)
        return "proximal" if scored and not self.objective.weighs_by_sampler else "behaviour"


@dataclass(frozen=True)
class PairTerm:
    """A preference loss on pairs of leaves of one tree (the DPO family); ``options`` are those of `pair_loss`."""

    choose: Pairing
    name: str = "preference"
    options: dict[str, Any] = field(default_factory=dict)
    whole_trees = True

    def now(self) -> PairTerm:
        return replace(self, options=now(self.options))

    def prepare(self, trees: Sequence[TokenTree]) -> None:
        for tree in trees:
            pairs = np.asarray(list(self.choose(tree)), np.int64).reshape(-1, 2)
            if pairs.size and count(tree, np.ones(tree.num_leaves, bool)) < tree.num_leaves:
                raise UserError(
                    f"The loss term '{self.name}' compares two sequences, and an episode of an agent has several; use "
                    "another term, or an agent that only appends to its calls."
                )
            if pairs.size and not (pairs.min() >= 0 and pairs.max() < tree.num_leaves):
                raise UserError(
                    f"The pairs of the loss term '{self.name}' name leaves outside 0..{tree.num_leaves - 1}."
                )
            tree.meta[f"pairs/{self.name}"] = pairs
            if "demonstrations" in tree.meta:  # whose tokens are in no other loss
                selected = (tree.origin == Origin.INJECTED) & (tree.response_leaves > 0)
                tree.set(_selection_column(self.name, "token").name, selected)

    whole_batch = True  # its pairs are numbers of leaves

    def extent(self, tree: TokenTree) -> Array:  # [L]
        pairs = tree.meta[f"pairs/{self.name}"]
        return np.where(np.isin(np.arange(tree.num_leaves), pairs), tree.response_length, 0)

    def has_gradient(self, tree: TokenTree) -> bool:
        return bool(self.extent(tree).any())

    def keep_means(self, tree: TokenTree, part: TokenTree, kept: Array) -> None:
        """Do nothing: a pair has one weight."""

    def normalizer(self, trees: Sequence[TokenTree], demonstrations: Sequence[TokenTree] = ()) -> float:
        return float(sum(len(tree.meta[f"pairs/{self.name}"]) for tree in [*trees, *demonstrations]))

    def on(self, batch: TreeBatch, normalizer: float, on_policy: bool, weight: float) -> LogprobTerm:
        leaf_pairs, leaves = [np.zeros((0, 2), np.int64)], 0
        if any(len(tree.meta[f"pairs/{self.name}"]) for tree in batch.trees):
            batch.check_whole(self.name)
        for tree in batch.trees:
            pairs = tree.meta[f"pairs/{self.name}"]
            rank = np.empty(tree.num_leaves, np.int64)
            rank[tree.leaf_order] = np.arange(tree.num_leaves)
            leaf_pairs.append(rank[pairs] + leaves if len(pairs) else leaf_pairs[0])
            leaves += tree.num_leaves
        chosen, rejected = torch.from_numpy(np.concatenate(leaf_pairs)).to(batch.target.device).unbind(1)
        selected = batch.columns.get(f"select_token/{self.name}")
        mask = batch.loss_mask if selected is None else batch.loss_mask | (selected != 0)
        loss = partial(
            pair_loss,
            paths=batch.paths(),
            chosen=chosen,
            rejected=rejected,
            normalizer=normalizer,
            ref_logprob=batch.columns.get("ref_logprob"),
            mask=mask,
            **self.options,
        )
        return LogprobTerm(loss, mask, weight, self.name)


def needed(trees: Sequence[TokenTree], terms: Sequence[LossTerm]) -> list[TokenTree]:
    """Return what the gradients of ``terms`` need of ``trees``, which are prepared and have credit.

    Responses that no term reads are left out, and of a single term the ends of responses after the last token that it
    reads. Loss and gradient stay the same: the normalisers are those of the whole trees, and so are means over a
    response.
    """
    if not terms or any(term.whole_batch for term in terms):
        return list(trees)
    parts = []
    for tree in trees:
        extent = np.max([term.extent(tree) for term in terms], axis=0)
        if len(terms) > 1:  # terms without a selection share one column of weights, which holds one term's means
            extent = np.where(extent > 0, tree.response_length, 0)
        part = cut(tree, extent)
        if part is not None:
            parts.append(part)
        if part is not None and part is not tree:
            for term in terms:
                term.keep_means(tree, part, extent > 0)
    return parts


def without_certain_ends(trees: Sequence[TokenTree], terms: Sequence[LossTerm], below: float) -> list[TokenTree]:
    """Return ``trees`` without the ends of responses after the last token that was sampled with a probability below
    ``below``; responses without such a token are left out. Tokens of unknown probability count as below.

    Normalisers, and means over a response, stay those of the whole responses. As in `needed`, nothing is left out where
    a term reads more than tokens, or where there are several.
    """
    if len(terms) != 1 or terms[0].whole_batch:
        return list(trees)
    parts, least = [], np.log(below)
    for tree in trees:
        uncertain = ~(tree.behaviour_logprob >= least) & tree.loss_mask  # not true of NaN
        extent = last_marked(tree, uncertain[tree.path_tokens])
        part = cut(tree, extent)
        if part is not None:
            parts.append(part)
            if part is not tree:
                terms[0].keep_means(tree, part, extent > 0)
    return parts


def _selection_column(term: str, per: str) -> Column:
    name = f"select_{per}/{term}"
    if name not in COLUMNS:
        meaning = f"how much it counts in the loss term '{term}'"
        declare(Column(name, np.float32, "leaf" if per == "leaf" else "token", meaning, merge="first", to_device=True))
    return COLUMNS[name]


def _weight_column(term: str, select: Selection | None) -> Column:
    """Return the column with the weights of leaves in means over the sequences of a term, 1 where it is not set."""
    name = SEQUENCE_WEIGHT if select is None else f"{SEQUENCE_WEIGHT}/{term}"
    if name not in COLUMNS:
        declare(Column(name, np.float32, "leaf", "its weight in means over sequences", fill=1, to_device=True))
    return COLUMNS[name]
