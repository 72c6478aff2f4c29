"""Which targets lie on which path, and differentiable sums along the paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import Arguments
from .path_sums import PathSum, SegmentSum


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
        message = "paths.target_end must lie after its target and at most at the number of targets"
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
        """Return the sum of ``values [M]`` along each leaf's path, ``[L]``. Differentiable.

        No value of one path reaches the sum of another, or its gradient.
        """
        result: Tensor = path_sum_op(values, self.target_end, self.leaf_target, self.leaf_start, self.sequence)
        return result

    def spread(self, values: Tensor) -> Tensor:
        """Return the adjoint of `sum`: at each target ``[M]`` the sum of ``values [L]`` over the leaves below it."""
        return _spread(values, self.target_end, self.leaf_target, self.leaf_start, self.sequence)


@torch.library.custom_op("rolltree::path_sum", mutates_args=())
def path_sum_op(
    values: Tensor,  # [M]
    target_end: Tensor,  # the rest: see `PathIndex`
    leaf_target: Tensor,
    leaf_start: Tensor | None,
    sequence: Tensor | None,
) -> Tensor:
    """Return the sums along the paths ``[L]``: an op, so that a compiler sees one call for any number of targets."""
    if sequence is None or leaf_start is not None:
        return PathSum(target_end, leaf_target, leaf_start).sum(values)
    of_target = SegmentSum(sequence)(values)
    return torch.cat([of_target, values.new_zeros(1)])[leaf_target.long()]  # -1 takes the zero


@path_sum_op.register_fake
def _(values: Tensor, target_end: Tensor, leaf_target: Tensor, *rest: Any) -> Tensor:
    return values.new_empty(leaf_target.shape[0])


def _spread(
    values: Tensor, target_end: Tensor, leaf_target: Tensor, leaf_start: Tensor | None, sequence: Tensor | None
) -> Tensor:
    if sequence is None or leaf_start is not None:
        return PathSum(target_end, leaf_target, leaf_start).spread(values)
    return values[sequence.long()]


spread_op = torch.library.custom_op("rolltree::path_spread", _spread, mutates_args=())
spread_op.register_fake(lambda values, target_end, *rest: values.new_empty(target_end.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return spread_op(grad, *ctx.saved_tensors), None, None, None, None


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return path_sum_op(grad, *ctx.saved_tensors), None, None, None, None


path_sum_op.register_autograd(_sum_backward, setup_context=_setup_context)
spread_op.register_autograd(_spread_backward, setup_context=_setup_context)
