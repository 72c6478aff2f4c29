"""The recurrence of a batch: the plan of its recurrent layers, and the states with which its segments begin and end."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from rolltree.kernels.tree_recurrence import RecurrencePlan, find_segments

from .batch import TreeBatch
from .rows import concat_rows, distinct_rows


class Recurrence:
    """Given to a model as ``recurrence``. This one is of whole trees, which begin with states of zero."""

    def __init__(self, plan: RecurrencePlan) -> None:
        self.plan = plan

    def initial(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """Return the given states [R, *shape] called ``name`` of a layer, in the dtype of ``like``; None for none."""
        return None

    def keep(self, layer: int, name: str, ends: Tensor, like: Tensor) -> None:
        """Take the end states [E, ...] of a layer; ``like`` is an input with a gradient, if any has."""


_made: weakref.WeakKeyDictionary[TreeBatch, Recurrence] = weakref.WeakKeyDictionary()


def recurrence_of(batch: TreeBatch) -> Recurrence:
    """Return the recurrence of a batch of whole trees; its plan is made once, from the trees on the host."""
    if batch not in _made:
        end = concat_rows([distinct_rows(tree) for tree in batch.trees]).end
        _made[batch] = Recurrence(RecurrencePlan.make(find_segments(end), device=batch.input_ids.device))
    return _made[batch]


def take_gradient(x: Tensor, total: Tensor, needs: Tensor) -> Tensor:
    """Return ``x``; its gradient is added to ``total``. ``needs`` makes autograd call the backward."""
    found: Tensor = _TakeGradient.apply(x, total, needs)
    return found


class _TakeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, needs: Tensor) -> Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.total.add_(grads[0])
        return None, None, None
