"""Sums along the paths of a tree and over runs of equal labels: linear time, in fp64, in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments


@dataclass(frozen=True)
class PathIndex:
    """Says which targets lie on which leaf's path, for targets in depth-first order.

    Target i is on the path of target j iff ``i <= j < target_end[i]``. For flat sequences ``target_end`` is the end of
    the target's sequence and ``leaf_target`` its last target. On a tree a leaf may learn from the end of its path
    alone, because the tokens before are its prompt: from the target after ``leaf_start`` on.
    """

    target_end: Tensor  # [M] int: end of the subtree of targets
    leaf_target: Tensor  # [L] int: last target of the leaf's path; -1: the leaf has none
    leaf_length: Tensor  # [L]: masked logical tokens of the path
    leaf_weight: Tensor | None  # [L]: w_l, contains the aggregation iff the fields do; None: differs within a leaf
    leaf_advantage: Tensor | None  # [L]; None: differs within a leaf
    sequence: Tensor | None = None  # [M] int: the leaf of each target, for flat sequences; None: a tree
    leaf_start: Tensor | None = None  # [L] int: last target before the leaf's first one; -1 or None: there is none
    pair_target: Tensor | None = None  # [P] int: target of every response token, leaf after leaf; -1: left out
    pair_leaf: Tensor | None = None  # [P] int: the leaf of each, ascending
    pair_advantage: Tensor | None = None  # [P]: credit that differs within a leaf; None: leaf_advantage

    def check(self, check: Arguments, M: int) -> None:
        """Check shapes, and that every target and leaf named exists, for ``M`` targets on the device of ``check``.

        Raises:
            ValueError, IndexError: they do not fit; see `Arguments`.
        """
        end = check.integers("paths.target_end", self.target_end, (M,), " like the targets")
        L = len(check.integers("paths.leaf_target", self.leaf_target, ("L",)))
        check.numbers("paths.leaf_length", self.leaf_length, (L,), ", one a leaf")
        for name in ("leaf_weight", "leaf_advantage"):
            if (value := getattr(self, name)) is not None:
                check.floats(f"paths.{name}", value, (L,), ", one a leaf")
        place = torch.arange(M, device=end.device)
        message = f"paths.target_end must lie after its target and at most at {M}"
        check.look(message, end, lambda: (end > place) & (end <= M), on_device=True)
        check.index("paths.leaf_target", self.leaf_target, M, low=-1)
        if self.sequence is not None:
            check.integers("paths.sequence", self.sequence, (M,), " like the targets")
            check.index("paths.sequence", self.sequence, L)
        if self.leaf_start is not None:
            check.integers("paths.leaf_start", self.leaf_start, (L,), ", one a leaf")
            check.index("paths.leaf_start", self.leaf_start, M, low=-1)
        if self.pair_target is not None:
            P = len(check.integers("paths.pair_target", self.pair_target, ("P",)))
            check.index("paths.pair_target", self.pair_target, M, low=-1)
            assert self.pair_leaf is not None
            check.integers("paths.pair_leaf", self.pair_leaf, (P,), " like pair_target")
            check.index("paths.pair_leaf", self.pair_leaf, L)
            if self.pair_advantage is not None:
                check.floats("paths.pair_advantage", self.pair_advantage, (P,), " like pair_target")

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values [M]`` along each leaf's path, ``[L]``. Differentiable."""
        result: Tensor = _PathSum.apply(values, self.target_end.long(), self.leaf_target.long(), self.leaf_start)
        return result

    def spread(self, values: Tensor) -> Tensor:
        """Return the adjoint of `sum`: at each target ``[M]`` the sum of ``values [L]`` over the leaves below it."""
        return _spread(values, self.target_end.long(), self.leaf_target.long(), self.leaf_start)


class _PathSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
        ctx.save_for_backward(target_end, leaf_target, leaf_start)
        x = values.double()
        # +x enters at the target, -x where its subtree ends; the running sum at target j is then the sum over j's path.
        # index_put sorts instead of adding atomically, so the order of the sum is fixed.
        steps = torch.cat([x, x.new_zeros(1)]).index_put((target_end,), -x, accumulate=True)
        along = torch.cat([steps.cumsum(0)[:-1], x.new_zeros(1)])
        total = along[leaf_target]  # -1 takes the zero
        if leaf_start is not None:
            total = total - along[leaf_start.long()]
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _spread(grads[0], *ctx.saved_tensors), None, None, None


def _spread(values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
    total = _below(values.double(), target_end, leaf_target, leaf_start)
    if leaf_start is not None:  # an empty sum is 0, not the rounding error of a leaf that was added and subtracted
        count = _below((values != 0).double(), target_end, leaf_target, leaf_start)
        total = torch.where(count > 0, total, 0)
    return total.to(values.dtype)


def _below(values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None) -> Tensor:
    M = len(target_end)
    at_leaf = values.new_zeros(M + 1).index_put((leaf_target,), values, accumulate=True)
    if leaf_start is not None:
        at_leaf = at_leaf.index_put((leaf_start.long(),), -values, accumulate=True)
    before = torch.cat([at_leaf.new_zeros(1), at_leaf[:M].cumsum(0)])  # -1 wrote into the last slot, which is left out
    return before[target_end] - before[:M]


class SegmentSum:
    """Sums values over runs of equal labels: ``[M] -> [M]``, at each element the sum over its run."""

    def __init__(self, label: Tensor) -> None:  # [M]
        M = len(label)
        place = torch.arange(M, device=label.device)
        begins = torch.ones(M, dtype=torch.bool, device=label.device)
        begins[1:] = label[1:] != label[:-1]
        self.first = torch.where(begins, place, 0).cummax(0).values if M else place
        ends = begins.roll(-1)
        self.last = torch.where(ends, place, M).flip(0).cummin(0).values.flip(0) if M else place

    def __call__(self, values: Tensor) -> Tensor:
        before = torch.cat([values.new_zeros(1, dtype=torch.float64), values.cumsum(0, dtype=torch.float64)])
        return (before[self.last + 1] - before[self.first]).to(values.dtype)
