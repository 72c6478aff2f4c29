"""Trees larger than a micro-batch, computed depth-first in pieces: exact, with one piece's activations in memory.

A piece is a run of consecutive rows. The earlier rows it sees are the path to its first row; their keys and values are
all it needs of them (`tree_attention`'s ``prefix_kv``). A piece that later ones see is computed twice: first without
gradient, for the keys and values that they need, and again when they are done and the gradient of these is known. Other
pieces are computed once. So the memory is one piece and the keys and values of one path
(Li et al. 2026, "DTA", arXiv 2602.00482, in pieces of many branches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rolltree.kernels import HeadPlan, tree_attention

from ..data import checks
from ..data.columns import Array
from ..data.tree import TokenTree
from .device import to_device
from .kv_store import AttentionRule
from .recurrence import PieceRecurrence
from .rows import Rows, distinct_rows, head_rows

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows ``begin`` to ``end`` of a batch, with the targets whose predictor is among them."""

    begin: int
    end: int
    last: int  # one past the last row that sees some row of the piece
    target: Tensor  # [m] int64, its targets among the batch's
    head_row: Tensor  # [r] int64, the distinct predictors, counted from `begin`, as in `TreeBatch`
    head_index: Tensor  # [m] int64, a target's predictor among these
    plan: HeadPlan | None = None  # of its head pass; None: made where it runs


def cut(tree: TokenTree, max_tokens: int, device: torch.device | str | None = None) -> tuple[Piece, ...]:
    """Pieces of at most ``max_tokens`` rows, each ended where the path is shortest, if anywhere in its second half."""
    checks.size("max_tokens", max_tokens)
    rows = distinct_rows(tree)
    starts = _starts(tree, rows)
    bounds = [0]
    while bounds[-1] < rows.num_rows:
        begin, limit = bounds[-1], bounds[-1] + max_tokens
        at = limit
        if limit < rows.num_rows:
            branches = starts[(starts > begin + max_tokens // 2) & (starts <= limit)]
            if len(branches):
                shortest = rows.position[branches] == rows.position[branches].min()
                at = int(branches[shortest][-1])
        bounds.append(min(at, rows.num_rows))
    predictor = rows.of_token[tree.parent_row[tree.prompt_length :]]
    temperature = tree.temperature[tree.prompt_length :]
    pieces = []
    for begin, end in pairwise(bounds):
        target = np.flatnonzero((predictor >= begin) & (predictor < end))
        head_row, head_index = head_rows(predictor[target] - begin, temperature[target])
        pieces.append(
            Piece(
                begin,
                end,
                int(rows.end[begin:end].max()),
                torch.from_numpy(target).to(device),
                torch.from_numpy(head_row).to(device),
                torch.from_numpy(head_index).to(device),
            )
        )
    return tuple(pieces)


def _starts(tree: TokenTree, rows: Rows) -> Array:
    """Rows after which a path may branch or end: the first ones of nodes, and of branches that rows alone have."""
    above = rows.of_token[tree.parent_row[rows.token[1:]]]
    apart = np.flatnonzero(above != np.arange(rows.num_rows - 1))
    return np.unique(np.concatenate([rows.of_token[tree.start], apart + 1, above[apart] + 1]))


class _Kept(NamedTuple):
    """The keys and values of one layer that later pieces see, and their gradient so far."""

    key: Tensor  # [n, Hkv, D]
    value: Tensor
    d_key: Tensor  # [n, Hkv, D] fp32
    d_value: Tensor


class PieceStore:
    """The keys and values of open pieces; the model gets it as ``kv_store`` while it computes a piece."""

    def __init__(self, rows: Rows, piece: Piece, open_pieces: Sequence[PieceStore], device: torch.device) -> None:
        ends = rows.end
        self.piece = piece
        self._ends, self._device = ends, device
        self.open_pieces = [
            (store, to_device(torch.from_numpy(np.flatnonzero(ends[store.rows] > piece.begin)), device))
            for store in open_pieces
        ]
        seen = [store.rows[ends[store.rows] > piece.begin] for store in open_pieces]
        keys = np.concatenate([*seen, np.arange(piece.begin, piece.end)])
        before = len(keys) - (piece.end - piece.begin)
        # rows of the prefix keep their order and close up to the piece
        end = np.minimum(ends[keys], piece.end).astype(np.int64) - piece.begin + before
        self.subtree_end = to_device(torch.from_numpy(end.astype(np.int32)), device)
        self.position = to_device(torch.from_numpy(rows.position[keys].astype(np.int32)), device)
        self.rows: Array = np.flatnonzero(ends[piece.begin : piece.end] > piece.end) + piece.begin
        self._local_rows = to_device(torch.from_numpy(self.rows - piece.begin), device)
        self._kept: dict[int, _Kept] = {}

    @cached_property
    def recurrence(self) -> PieceRecurrence:
        """The states of recurrent layers, for models that have them."""
        before = [store.recurrence for store, _ in self.open_pieces]
        return PieceRecurrence(self._ends, self.piece.begin, self.piece.end, before, self._device)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [N, Hq, D]
        key: Tensor,  # [N, Hkv, D]
        value: Tensor,  # [N, Hkv, D]
        rule: AttentionRule,
    ) -> Tensor:  # [N, Hq, D]
        if not torch.is_grad_enabled():
            if len(self._local_rows):
                if layer_idx in self._kept:
                    raise ValueError(
                        f"Layer {layer_idx} attends twice in a forward, which trees in pieces do not support; raise "
                        "max_tokens."
                    )
                kept = (t.index_select(0, self._local_rows) for t in (key, value))
                zeros = (torch.zeros_like(key[: len(self._local_rows)], dtype=torch.float32) for _ in range(2))
                self._kept[layer_idx] = _Kept(*kept, *zeros)
        elif layer_idx in self._kept:
            stored = self._kept[layer_idx]
            key = _AddGradient.apply(key, self._local_rows, stored.d_key)
            value = _AddGradient.apply(value, self._local_rows, stored.d_value)
        prefix = None
        if self.open_pieces:
            keys, values = [], []
            for store, which in self.open_pieces:
                of_store = store._kept[layer_idx]
                keys.append(_TakeGradient.apply(of_store.key, which, of_store.d_key, query))
                values.append(_TakeGradient.apply(of_store.value, which, of_store.d_value, query))
            prefix = torch.cat(keys), torch.cat(values)
        return tree_attention(
            query,
            key,
            value,
            self.subtree_end,
            scale=rule.scale,
            position=self.position,
            window=rule.window,
            chunk=rule.chunk,
            softcap=rule.softcap,
            sink=rule.sink,
            prefix_kv=prefix,
        )


class _AddGradient(torch.autograd.Function):
    """Returns ``x``; adds the gradient from later pieces at ``rows``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, gradient = ctx.saved_tensors
        return grads[0].index_add(0, rows, gradient.to(grads[0].dtype)), None, None


class _TakeGradient(torch.autograd.Function):
    """Returns ``x[which]``; adds its gradient to ``total[which]``. ``needs`` makes autograd call the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, which: Tensor, total: Tensor, needs: Tensor) -> Tensor:
        ctx.which, ctx.total = which, total
        return x.index_select(0, which)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.total.index_add_(0, ctx.which, grads[0].float())
        return None, None, None, None


def depth_first(
    tree: TokenTree,
    pieces: Sequence[Piece],
    device: torch.device,
    *,
    run: Callable[[PieceStore], T],
    use: Callable[[PieceStore, T], None],
    gradients: bool,
) -> None:
    """Compute the pieces and use each once: in order or, with gradients, after all pieces that see it.

    Args:
        run: computes a piece with the model; with gradients, twice for a piece that later ones see.
        use: takes the result of ``run``; with gradients it must run the backward.
    """
    open_pieces: list[PieceStore] = []
    rows = distinct_rows(tree)

    def close(until: int) -> None:
        while open_pieces and open_pieces[-1].piece.last <= until:
            store = open_pieces.pop()
            if gradients:
                use(store, run(store))

    for piece in pieces:
        close(piece.begin)
        store = PieceStore(rows, piece, tuple(open_pieces), device)
        seen_later = piece.last > piece.end
        with torch.set_grad_enabled(gradients and not seen_later):
            result = run(store)
            if not (gradients and seen_later):
                use(store, result)
        if seen_later:
            open_pieces.append(store)
    close(rows.num_rows)
