"""The trees that an update computes, which each of several ranks makes for its own part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..data.tree import TokenTree
from ..train.group import Group
from ..train.terms import LossTerm, needed

Prepare = Callable[[TokenTree], TokenTree | None]
"""Returns what an update computes of a tree; None: nothing."""


class Facts(NamedTuple):
    """Numbers of what an update computes of a tree, or sums of them.

    Attributes:
        needed: 1 if a term reads something of it.
        read: tokens in the loss, once a leaf, of what terms read of a rollout.
        left: those that are left when its uncertain ends are cut.
        loss: those of what is computed; 0 where terms narrow it, as critics alone need them.
        sampled: tokens of it that were sampled for this step.
        logical: tokens of all its paths.
        computed: 1 if something of it is computed.
    """

    needed: int = 0
    read: int = 0
    left: int = 0
    loss: int = 0
    sampled: int = 0
    logical: int = 0
    computed: int = 0


class Live(Sequence[TokenTree]):
    """The parts of ``trees`` that an update computes, in their order; a tree without any is left out.

    Each rank prepares every ``group.shares``-th tree and tells the others its `Facts`. It prepares another tree when it
    reads that one, so no rank reads the tokens of all trees.

    Args:
        narrow: leaves out what no term reads; None: all is computed.
        cut: leaves out ends of rollouts; None: none.
        share: merges equal tokens of what is left.
        demonstrations: number of these, at the end of ``trees``.

    Attributes:
        total: sums over all trees.
    """

    def __init__(
        self,
        trees: Sequence[TokenTree],
        group: Group,
        *,
        narrow: Prepare | None,
        cut: Prepare | None,
        share: Callable[[TokenTree], TokenTree],
        demonstrations: int,
    ) -> None:
        self._trees, self._narrow, self._cut, self._share = trees, narrow, cut, share
        self._rollouts = len(trees) - demonstrations
        self._prepared: dict[int, TokenTree] = {}
        facts = {place: self._prepare(place) for place in range(group.share, len(trees), group.shares)}
        for of_share in group.of_shares(facts) if group.shares > 1 else ():
            facts |= of_share
        self._places = [place for place in range(len(trees)) if facts[place].computed]
        self.total = Facts(*map(sum, zip(Facts(), *facts.values(), strict=True)))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if (place := self._places[at]) not in self._prepared:
            self._prepare(place)
        return self._prepared[place]

    def first_uncut(self) -> TokenTree:
        """Return what terms read of the first tree of which they read something."""
        return next(part for tree in self._trees if (part := self._narrowed(tree)) is not None)

    def _narrowed(self, tree: TokenTree) -> TokenTree | None:
        return tree if self._narrow is None else self._narrow(tree)

    def _prepare(self, place: int) -> Facts:
        whole = self._narrowed(self._trees[place])
        if whole is None:
            return Facts()
        rollout = place < self._rollouts
        cuts = rollout and self._cut is not None
        part = self._cut(whole) if rollout and self._cut is not None else whole
        read = whole.loss_tokens if cuts else 0
        if part is None:
            return Facts(needed=1, read=read)
        self._prepared[place] = self._share(part)
        left = part.loss_tokens if cuts else 0
        loss = part.loss_tokens if self._narrow is None else 0
        new = rollout and "replayed" not in part.meta
        return Facts(1, read, left, loss, part.sampled_tokens if new else 0, part.logical_tokens, 1)


def computed(
    rollouts: Sequence[TokenTree],
    demonstrations: Sequence[TokenTree],
    terms: Sequence[LossTerm],
    group: Group,
    *,
    cut: Prepare | None,
    share: Callable[[TokenTree], TokenTree],
    whole: bool,
) -> Live:
    """Return what an update by ``terms`` computes of both; other arguments as for `Live`.

    Args:
        whole: all of it, as a critic and the balance of experts learn from all tokens. So it is where no term reads
            anything: an update without a gradient still moves what an optimizer remembers.
    """
    make = partial(Live, [*rollouts, *demonstrations], group, cut=cut, share=share, demonstrations=len(demonstrations))
    live = make(narrow=None if whole else lambda tree: next(iter(needed([tree], terms)), None))
    return live if whole or live.total.needed else make(narrow=None)
