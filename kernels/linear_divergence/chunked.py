"""`linear_divergence` over chunks of rows: the logits of both models exist for a chunk at a time, and once.

A chunk is a product for the student's tile and one for the teacher's, a row kernel that reads both tiles and writes the
gradient over the student's, and two products for the gradients of hidden and weight: 2 N (H + H_t) V + 4 N H V FLOP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .. import dispatch
from ..forward_gradients import gradient_dtype
from ..linear_logprob import chunked
from ..linear_logprob.head import Head, HeadGradient
from .kinds import Kind


class RowLogits(NamedTuple):
    """Logits of C rows of the student, or of the teacher."""

    logits: Tensor  # [C, V] fp32 or fp64, without bias
    bias: Tensor  # [V] or [0], in the dtype of logits like temperature
    temperature: Tensor  # [C], any stride
    softcap: float  # 0: none


class DivergenceRows(chunked.Tiled, Protocol):
    """Kernels of a backend that read the tiles of both models.

    ``reference`` defines ``divergence(student, teacher, kind, share, factor, divergence, entropy, teacher_entropy,
    out)``, which fills the tensors after ``factor``.
    """

    @property
    def divergence(self) -> Callable[..., None]: ...


@dataclass(frozen=True)
class CompiledDivergenceRows:
    """Row kernels of csrc/cpu/linear_divergence.cpp."""

    divergence: Callable[..., None]
    ROW_MULTIPLE: int = 1  # rows of a tile lie end to end


CPU = CompiledDivergenceRows(dispatch.compiled_op("cpu", "divergence_rows"))


class Side(NamedTuple):
    """One of the two models: its rows, R of them in the order of the pairs, and its head."""

    hidden: Tensor  # [N, H]
    head: Head
    row: Tensor | None  # [R] int64, rows of hidden; None: all, in order
    temperature: Tensor  # [R], in the accumulation dtype
    softcap: float  # 0: none

    def taken(self, pairs: slice) -> Tensor:
        """Return the hidden states of ``pairs``: a view where rows are in order."""
        return self.hidden[pairs] if self.row is None else self.hidden[self.row[pairs]]

    def logits(self, hidden: Tensor, pairs: slice, tile: Tensor) -> RowLogits:
        """Fill ``tile`` with the logits of ``hidden``, which are those of ``pairs``."""
        logits = self.head.logits(hidden, tile[: len(hidden)])
        return RowLogits(logits, self.head.bias, self.temperature[pairs], self.softcap)


class Scores(NamedTuple):
    """Values of R pairs, in the accumulation dtype."""

    divergence: Tensor  # [R]
    entropy: Tensor  # [R]
    teacher_entropy: Tensor  # [R]


def one_pass(
    rows: DivergenceRows,
    student: Side,
    teacher: Side,
    kind: Kind,
    factor: Tensor,  # [R], the gradient of the loss with respect to each divergence
    repeated: bool,  # several pairs may have one row of the student
    need_hidden: bool,
    need: HeadGradient,
) -> tuple[Tensor, Scores]:
    """Return the gradient of hidden ``[N, H]``, or ``[0]``, and the scores; gradients of the head are added to
    ``need``."""
    R, V = len(factor), len(student.head.weight)
    scores = Scores(*factor.new_empty(3, R))
    C = chunked.chunk_rows(R, V, factor.device, tiles=2)
    tile, d_tile = chunked.new_tiles(rows, student.head, C)
    teacher_tile = chunked.new_tile(rows, teacher.head.bias, C, V)
    hidden, with_gradient = student.hidden, need_hidden or need.needed
    dtype = factor.dtype if repeated else gradient_dtype(hidden)
    d_hidden = hidden.new_zeros(hidden.shape if need_hidden else 0, dtype=dtype)
    for pairs in chunked.chunks(R, C):
        n = pairs.stop - pairs.start
        x = student.taken(pairs)
        of_student = student.logits(x, pairs, tile)
        of_teacher = teacher.logits(teacher.taken(pairs), pairs, teacher_tile)
        out = d_tile[: n if with_gradient else 0]
        values = (part[pairs] for part in scores)
        rows.divergence(of_student, of_teacher, kind.code, kind.share, factor[pairs], *values, out)
        if need_hidden:
            in_order = student.row is None
            d_x = d_hidden[pairs] if in_order else torch.empty_like(x, dtype=dtype)
            student.head.to_hidden(out, d_x)
            if student.row is not None and repeated:  # sorted, not atomic: the order of the sum is fixed
                d_hidden.index_put_((student.row[pairs],), d_x, accumulate=True)
            elif student.row is not None:
                d_hidden.index_copy_(0, student.row[pairs], d_x)
        if with_gradient:
            need.add(out, x)
    return d_hidden.to(gradient_dtype(hidden)), scores
