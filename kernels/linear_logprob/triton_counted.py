"""The backward's two products over some rows alone, where only the device knows which and how many (Triton).

``origin`` lists the rows that have a gradient, ``count`` says how many it holds; both stay on the device, so the host
neither waits nor launches anything else for another count. Programs beyond the count leave at once, and the sum over
rows ends there. Worth its slower multiplication where enough rows are left out; `plan.COUNT_BELOW` decides.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 128, 128, 64


@triton.jit
def _to_hidden(
    d_logits,  # [C, V]
    weight,  # [V, H]
    origin,  # [C] int64
    count,  # [] int32
    d_hidden,  # [C, H], out: rows named by origin
    V,
    H,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    number = tl.load(count)
    first = tl.program_id(0) * ROWS
    if first >= number:
        return
    place = first + tl.arange(0, ROWS)
    present = place < number
    rows = tl.load(origin + place, mask=present, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < H
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, V, INNER):
        inner = k + tl.arange(0, INNER)
        known = inner < V
        g = tl.load(d_logits + rows[:, None] * V + inner[None, :], mask=present[:, None] & known[None, :], other=0.0)
        w = tl.load(
            weight + inner.to(tl.int64)[:, None] * H + columns[None, :],
            mask=known[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(g, w, total, input_precision="ieee")
    out = d_hidden + rows[:, None] * H + columns[None, :]
    tl.store(out, total.to(d_hidden.dtype.element_ty), mask=present[:, None] & inside[None, :])


@triton.jit
def _accumulate(
    d_logits,  # [C, V]
    hidden,  # [C, H]
    origin,  # [C] int64
    count,  # [] int32
    d_weight,  # [V, H] fp32, added to
    V,
    H,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    number = tl.load(count)
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = (tokens < V)[:, None] & (columns < H)[None, :]
    out = d_weight + tokens[:, None] * H + columns[None, :]
    total = tl.load(out, mask=within, other=0.0)
    for k in range(0, number, INNER):
        place = k + tl.arange(0, INNER)
        present = place < number
        rows = tl.load(origin + place, mask=present, other=0)
        g = tl.load(
            d_logits + rows[None, :] * V + tokens[:, None], mask=present[None, :] & (tokens < V)[:, None], other=0.0
        )
        x = tl.load(
            hidden + rows[:, None] * H + columns[None, :], mask=present[:, None] & (columns < H)[None, :], other=0.0
        )
        total = tl.dot(g, x, total, input_precision="ieee")
    tl.store(out, total, mask=within)


def rows_on_device(alive: Tensor) -> tuple[Tensor, Tensor]:  # [C] bool
    """``origin [C] int64`` (the rows that are alive, in order, then the others) and ``count [] int32``."""
    return torch.sort((~alive).to(torch.uint8), stable=True).indices, alive.sum(dtype=torch.int32)


def to_hidden(d_logits: Tensor, weight: Tensor, origin: Tensor, count: Tensor, d_hidden: Tensor) -> None:
    """``d_hidden [C, H]`` in the rows named by ``origin``: ``d_logits [C, V] weight [V, H]``; others are left alone."""
    (C, V), H = d_logits.shape, weight.shape[1]
    _to_hidden[(triton.cdiv(C, ROWS), triton.cdiv(H, COLUMNS))](
        d_logits, weight, origin, count, d_hidden, V, H, ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER,
        num_warps=8, num_stages=3,
    )  # fmt: skip


def accumulate(d_weight: Tensor, d_logits: Tensor, hidden: Tensor, origin: Tensor, count: Tensor) -> None:
    """``d_weight [V, H] += d_logits^T hidden`` over the rows named by ``origin``, in fp32."""
    V, H = d_weight.shape
    _accumulate[(triton.cdiv(V, ROWS), triton.cdiv(H, COLUMNS))](
        d_logits, hidden, origin, count, d_weight, V, H, ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER,
        num_warps=8, num_stages=3,
    )  # fmt: skip
