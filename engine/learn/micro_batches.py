"""The micro-batches of a learner: how it packs the trees of an update, and those that roles score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..batches.batch import TreeBatch
from ..batches.cost import CostModel, Work
from ..batches.distribute import Share, deal, own_share
from ..batches.equal_prefixes import share_equal_prefixes
from ..batches.pack import pack
from ..data.tree import TokenTree
from ..errors import UserError
from ..model import varlen
from ..model.invariant.install import is_invariant
from ..model.pictures import both_ways
from ..model.self_check import skip_check, tree_error, trees_fit
from ..train.terms import LossTerm, TokenTerm
from .learning import LearningParts


class MicroBatches:
    """Packs trees into the micro-batches of this rank.

    Args:
        note: called with sentences for the user.

    Attributes:
        max_tokens: packed tokens of one micro-batch of an update; halved by each one that runs out of memory.
        flat: the model computes trees wrongly, so that updates share no prefixes; None before that is tested.
        work, again: of the forward pass of the batches that were packed last, those of all ranks, and of the pieces
            of them that are computed a second time.
    """

    def __init__(self, parts: LearningParts, note: Callable[[str], object]) -> None:
        self.parts, self.model, self.group, self.note = parts, parts.model, parts.group, note
        self.cost = CostModel.of(parts.model)
        self.max_tokens = parts.max_tokens
        self.flat: bool | None = None
        self.work, self.again = Work(), Work()

    def shared(self, tree: TokenTree, terms: Sequence[LossTerm]) -> TokenTree:
        """Merge equal prefixes of different leaves, unless an objective is defined on nodes or updates are flat."""
        by_node = (isinstance(t, TokenTerm) and t.objective.ratio_level == "segment" for t in terms)
        return tree if self.shares_nothing([tree]) or any(by_node) else share_equal_prefixes(tree)

    def packed(self, trees: Sequence[TokenTree], terms: Sequence[LossTerm]) -> list[TreeBatch]:
        """Return the micro-batches of an update on this rank: as many as the others have.

        Raises:
            UserError: a tree that does not fit one is divided, and one of ``terms`` compares responses of a whole tree.
        """
        unshare = self.cost if varlen.kernel() is not None else None
        flat = self.shares_nothing(trees)
        options: dict[str, Any] = {"max_tokens": self.max_tokens, "flat": flat, "unshare": unshare, **self._replay}
        if self.group.count == 1:
            packed = pack(trees, in_pieces=self.in_pieces, **options)
            self.work, self.again = Work.of(packed), Work.again(packed)
            return [replace(batch, of=len(packed)) for batch in packed]
        share = self._dealt(trees, options) if is_invariant(self.model) else self._own_share(trees, options)
        if not flat and not share.whole and (needs := [term.name for term in terms if term.whole_trees]):
            raise UserError(
                f"The loss term '{needs[0]}' compares responses of a whole tree, and with trainer.ranks = "
                f"{self.group.count} a tree over trainer.max_tokens = {self.max_tokens} is divided; raise "
                "trainer.max_tokens, or set trainer.ranks to 1."
            )
        self.work, self.again = share.work, Work()
        return [replace(batch, of=share.real) for batch in share.batches]

    def _own_share(self, trees: Sequence[TokenTree], options: Mapping[str, Any]) -> Share:
        group = self.group
        return own_share(trees, group.share, group.shares, self.cost, group.of_shares, **options)

    def _dealt(self, trees: Sequence[TokenTree], options: Mapping[str, Any]) -> Share:
        """Return this rank's batches of those of one process, whose bits they add up to."""
        shares = deal(trees, self.group.shares, **options)
        every = [batch for batches in shares for batch in batches]
        real = [batch for batch in every if batch.trees]
        parts = [part for b in real for part in zip(b.tree_index, b.leaf_index, strict=True)]
        whole = all(len(leaves) == trees[i].num_leaves for i, leaves in parts)
        return Share(shares[self.group.share], len(real), whole, Work.of(every))

    def halve(self, trees: Sequence[TokenTree]) -> bool:
        """Halve the micro-batches after an update of ``trees`` that ran out of memory.

        Returns:
            False if the longest sequence would not fit, or on one of several ranks, since the others wait for it in a
            collective.
        """
        if self.group.count > 1 or self.max_tokens // 2 < max(int(tree.path_length.max()) for tree in trees):
            return False
        self.max_tokens //= 2
        self.note(f"An update ran out of memory; micro-batches have {self.max_tokens} tokens from now on.")
        return True

    def to_score(self, trees: Sequence[TokenTree], *, in_pieces: bool = False, flat: bool = False) -> list[TreeBatch]:
        """Pack the trees that this rank scores."""
        options: dict[str, Any] = {"max_tokens": self.parts.max_tokens, "flat": flat, **self._replay}
        if self.group.count == 1:
            packed = pack(trees, in_pieces=in_pieces, **options)
            self.work, self.again = Work.of(packed), Work()
            return packed
        share = self._own_share(trees, options)
        self.work, self.again = share.work, Work()
        return share.batches

    @property
    def in_pieces(self) -> bool:
        """Larger trees are computed in pieces; pictures that attend in both directions are not, and such trees are
        split by their leaves."""
        return both_ways(self.model) is None

    @property
    def _replay(self) -> dict[str, bool]:
        return {"replay_routes": self.parts.replay_routes}

    def shares_nothing(self, trees: Sequence[TokenTree]) -> bool:
        """Return True if the model computes trees wrongly, so that updates must be flat; tested once, on rollouts."""
        if self.flat is None and trees:
            skip_check(self.model)  # it is done here, on real rollouts, or not wanted
            error = tree_error(self.model, trees) if self.parts.self_check else None
            self.flat = not all(trees_fit(e, self.model.dtype) for e in self.group.gather(error))
            if self.flat:
                self.note(
                    f"{type(self.model).__name__} gives other log-probs on packed trees than on plain sequences (mean "
                    f"difference {error:.3g}): updates share no prefixes. trainer.self_check = false trains on trees "
                    "nevertheless."
                )
        return bool(self.flat)
