"""The recurrence of a batch: the plan of its recurrent layers, and the states with which its segments begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels.tree_recurrence import RecurrencePlan, Segments, find_segments

from ..data.columns import Array


class Recurrence:
    """Given to a model as ``recurrence``. This one is of whole trees, which begin with states of zero."""

    def __init__(self, plan: RecurrencePlan) -> None:
        self.plan = plan

    def initial(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """Return the given states [R, *shape] called ``name`` of a layer, None for none; they need a gradient if
        ``like`` does."""
        return None

    def keep(self, layer: int, name: str, ends: Tensor, out: Tensor) -> Tensor:
        """Take the end states [E, ...] of a layer; return its output, through which their gradient comes."""
        return out


class PieceRecurrence(Recurrence):
    """The recurrence of one piece of a tree: its segments begin with the end states of pieces before it.

    As with keys, a piece that later ones see is computed twice: first for its states, and again with the gradients that
    the later pieces have added to these.
    """

    def __init__(
        self,
        subtree_end: Array,  # [N], of the whole tree
        begin: int,
        end: int,
        before: Sequence[PieceRecurrence],
        device: torch.device,
    ) -> None:
        whole = find_segments(subtree_end)
        last = whole.start + whole.length - 1
        above = np.where(whole.parent >= 0, last[whole.parent], -1)  # the row before each segment
        touched = np.flatnonzero((last >= begin) & (whole.start < end))
        start = np.maximum(whole.start[touched], begin)
        above_row = np.where(whole.start[touched] < begin, begin - 1, above[touched])
        inside = above_row >= begin
        parent = np.where(inside, np.searchsorted(start, above_row, side="right") - 1, -1)
        rows = above[(whole.start >= end) & (above >= begin) & (above < end)]
        if end < len(subtree_end) and end not in whole.start:
            rows = np.append(rows, end - 1)  # the piece ends within a segment
        self.rows = np.unique(rows)
        """Rows whose states later pieces begin with."""
        self._device = device
        state_rows = np.unique(above_row[~inside & (above_row >= 0)])
        self._sources = [  # the piece and the place there of each given state
            next((piece, int(np.searchsorted(piece.rows, row))) for piece in before if row in piece.rows)
            for row in state_rows.tolist()
        ]
        initial = np.where(inside | (above_row < 0), -1, np.searchsorted(state_rows, above_row))
        segments = Segments(start - begin, np.minimum(last[touched] + 1, end) - start, parent, initial)
        ends = np.searchsorted(start, self.rows, side="right") - 1
        super().__init__(RecurrencePlan.make(segments, ends=ends, states=len(state_rows), device=device))
        self._kept: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # states and their gradients so far

    def initial(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        if not self._sources:
            return None
        initial_states = []
        for piece, place in self._sources:
            states, gradients = piece._kept[layer, name]
            initial_states.append(_TakeGradient.apply(states[place], gradients[place], like))
        return torch.stack(initial_states)

    def keep(self, layer: int, name: str, ends: Tensor, out: Tensor) -> Tensor:
        if not len(ends):
            return out
        if (layer, name) not in self._kept:
            self._kept[layer, name] = ends.detach(), torch.zeros_like(ends)
            return out
        added: Tensor = _AddGradient.apply(out, ends, self._kept[layer, name][1])
        return added


class _AddGradient(torch.autograd.Function):
    """Returns ``out``; the gradient of ``ends`` is that of later pieces."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ends: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0], None


class _TakeGradient(torch.autograd.Function):
    """Returns ``x``; its gradient is added to ``total``. ``needs`` makes autograd call the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, needs: Tensor) -> Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.total.add_(grads[0])
        return None, None, None
