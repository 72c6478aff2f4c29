"""Triton backend of the convolution: each row gathers the inputs of its ancestors.

    forward   a tile of rows and channels a program: K inputs a row are read, the output is written
    dx        a row and block of channels a program: sums over the rows that read it, listed by tap and row
              (`Windows.readers`), so nothing is added atomically; a row that is no branch point has K
    dweight   a block of rows and channels a program: sums in fp32 over its rows, and then over programs, in their order

Sums are float32. Nobody has run these kernels on a GPU: Triton's interpreter runs them in tests, and ``make aot``
compiles them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import Windows

ROWS, COLUMNS = 16, 128  # of a tile
TILES = 16  # of rows, of a program of the weight's gradient
READ_COLUMNS = 512  # of a program of the input's gradient


@triton.jit(do_not_specialize=["T"])
def convolution_kernel(
    x,  # [N, D]
    weight,  # [D, TAPS]
    bias,  # [D] or None
    before,  # [TAPS - 1, T] int64
    out,  # [T, D]
    T, D,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < T)[:, None] & (column < D)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        at = row
        if tap > 0:
            at = tl.load(before + (tap - 1) * T.to(tl.int64) + row, mask=row < T, other=0)
        read = tl.load(x + at[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
        of = tl.load(weight + column * TAPS + (TAPS - 1 - tap), mask=column < D, other=0.0).to(tl.float32)
        total += read * of[None, :]
    tl.store(out + row[:, None] * D + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def convolution_input_kernel(
    grad,  # [T, D]
    weight,  # [D, TAPS]
    readers,  # [TAPS T] int64: tap T + row
    begin,  # [N + 1] int64: where each input's readers begin
    dx,  # [N, D]
    T, D,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(tl.load(begin + at), tl.load(begin + at + 1)):
        reader = tl.load(readers + i)
        tap, row = reader // T, reader % T
        read = tl.load(grad + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        of = tl.load(weight + column * TAPS + (TAPS - 1 - tap), mask=column < D, other=0.0).to(tl.float32)
        total += read * of
    tl.store(dx + at * D + column, total.to(dx.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["T"])
def convolution_weight_kernel(
    grad,  # [T, D]
    x,  # [N, D]
    before,  # [TAPS - 1, T] int64
    partial,  # [programs, TAPS + 1, D] fp32: of each tap, the row's own input first, and of the bias
    T, D,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    partial += program * (TAPS + 1) * D + column
    for tap in tl.static_range(TAPS + 1):
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for tile in range(TILES):
            row = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
            inside = (row < T)[:, None] & (column < D)[None, :]
            of = tl.load(grad + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
            if tap < TAPS:
                at = row
                if tap > 0:
                    at = tl.load(before + (tap - 1) * T.to(tl.int64) + row, mask=row < T, other=0)
                of *= tl.load(x + at[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
            total += of
        tl.store(partial + tap * D, tl.sum(total, 0), mask=column < D)


def tree_convolution_forward(
    x: Tensor,  # [N, D]
    weight: Tensor,  # [D, K]
    bias: Tensor | None,  # [D]
    windows: Windows,
) -> Tensor:  # [T, D]
    """Like `reference.tree_convolution_forward`; float32, bfloat16 or float16."""
    rows, (width, taps) = windows.before.shape[1], weight.shape
    out = x.new_empty(rows, width)
    if out.numel():
        convolution_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))](
            x, weight.contiguous(), None if bias is None else bias.contiguous(), windows.before, out, rows, width,
            TAPS=taps, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def tree_convolution_backward(
    grad: Tensor,  # [T, D]
    x: Tensor,  # [N, D]
    weight: Tensor,  # [D, K]
    windows: Windows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `reference.tree_convolution_backward`; float32, bfloat16 or float16."""
    rows, (width, taps) = len(grad), weight.shape
    grad, weight = grad.contiguous(), weight.contiguous()
    dx, programs = torch.empty_like(x), triton.cdiv(rows, ROWS * TILES)
    partial = x.new_empty((programs, taps + 1, width), dtype=torch.float32)
    dx[-1:] = 0  # read by rows that have no input there
    if grad.numel():
        readers, begin = windows.readers
        convolution_input_kernel[(len(x) - 1, triton.cdiv(width, READ_COLUMNS))](
            grad, weight, readers, begin, dx, rows, width, TAPS=taps, COLUMNS=READ_COLUMNS,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        convolution_weight_kernel[(programs, triton.cdiv(width, COLUMNS))](
            grad, x, windows.before, partial, rows, width,
            TAPS=taps, ROWS=ROWS, COLUMNS=COLUMNS, TILES=TILES, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    total = partial.sum(0)
    return dx, total[:taps].flip(0).T.to(weight.dtype), total[taps].to(weight.dtype)
