"""Row statistics straight from the GEMM: no logits in memory, not even a tile (Triton).

A program multiplies a block of rows with its share of the vocabulary, tile by tile, and folds each tile of fp32
accumulators into running maxima and sums (as `triton._statistics` does) before the next one. The vocabulary is cut into
a number of shares that depends on V alone, so a row's result does not depend on the batch; shares are joined in order.
Saves the 4 V bytes a row that a tile costs in each direction, if it multiplies nearly as fast as cuBLAS.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton import _scaled

COLUMNS, INNER = 128, 64
SHARES = 16


@triton.jit(do_not_specialize=["N"])
def _statistics(
    hidden,  # [N, H]
    weight,  # [V, H]
    bias,  # [V]
    temperature,  # [N]
    temperature_stride,
    partial,  # [4, shares, N]: maximum, then sums of e, e d, e^2 with e = exp(d), d = z - maximum
    N,
    V,
    H,
    softcap,
    tiles,  # of the vocabulary in a share
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SUM_P2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    # programs of one share run together, so its part of the weight stays in the cache
    share = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < N
    inverse = 1.0 / tl.load(temperature + rows * temperature_stride, mask=present, other=1.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    e_sum = tl.zeros((ROWS,), tl.float32)
    ed_sum = tl.zeros((ROWS,), tl.float32)
    e2_sum = tl.zeros((ROWS,), tl.float32)
    first = share * tiles * COLUMNS
    for tile in range(tiles):
        columns = first + tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < V
        u = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, H, INNER):
            inner = k + tl.arange(0, INNER)
            x = tl.load(
                hidden + rows[:, None] * H + inner[None, :], mask=present[:, None] & (inner < H)[None, :], other=0.0
            )
            w = tl.load(
                weight + columns.to(tl.int64)[None, :] * H + inner[:, None],
                mask=inside[None, :] & (inner < H)[:, None],
                other=0.0,
            )
            u = tl.dot(x, w, u, input_precision="ieee")
        z, _ = _scaled(u, bias, columns[None, :], inside[None, :], inverse[:, None], softcap, HAS_BIAS, HAS_SOFTCAP)
        z = tl.where(inside[None, :], z, float("-inf"))
        larger = tl.maximum(most, tl.max(z, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        step = most - shift
        fresh = step <= -100.0  # the sums so far vanish beside the new maximum
        step = tl.where(fresh, 0.0, step)
        rescale = tl.where(fresh, 0.0, tl.exp(step))
        d = z - shift[:, None]
        none = d <= -100.0  # false for NaN, which must go on
        d = tl.where(none, 0.0, d)
        e = tl.where(none, 0.0, tl.exp(d))
        if ENTROPY:
            ed_sum = rescale * (ed_sum + step * e_sum) + tl.sum(e * d, 1)
        if SUM_P2:
            e2_sum = rescale * rescale * e2_sum + tl.sum(e * e, 1)
        e_sum = rescale * e_sum + tl.sum(e, 1)
        most = larger
    out = partial + share.to(tl.int64) * N + rows
    stride = tl.num_programs(1).to(tl.int64) * N
    tl.store(out, most, mask=present)
    tl.store(out + stride, e_sum, mask=present)
    tl.store(out + 2 * stride, ed_sum, mask=present)
    tl.store(out + 3 * stride, e2_sum, mask=present)


def statistics(
    hidden: Tensor,  # [N, H] bf16, fp16 or fp32
    weight: Tensor,  # [V, H]
    bias: Tensor,  # [V] fp32, or [0]
    temperature: Tensor,  # [N] fp32
    softcap: float,
    want_entropy: bool,
    want_sum_p2: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(logsumexp [N], correction [N], entropy [N], sum_p2 [N])``, empty where not wanted; as the row kernels'."""
    (N, H), V = hidden.shape, len(weight)
    shares, tiles = shares_of(V)
    partial = hidden.new_empty(4, shares, N, dtype=torch.float32)
    rows = rows_of(softcap)
    if N:
        _statistics[(triton.cdiv(N, rows), shares)](
            hidden.contiguous(),
            weight.contiguous(),
            bias,
            temperature,
            temperature.stride(0),
            partial,
            N,
            V,
            H,
            softcap,
            tiles,
            HAS_BIAS=len(bias) > 0,
            HAS_SOFTCAP=softcap != 0,
            ENTROPY=want_entropy,
            SUM_P2=want_sum_p2,
            ROWS=rows,
            COLUMNS=COLUMNS,
            INNER=INNER,
            num_warps=8,
            num_stages=3,
        )
    most, e, ed, e2 = partial.double()
    top = most.max(0).values
    shift = torch.where(top == -torch.inf, 0, top)
    step = (most - shift).clamp(min=-200)  # -inf times nothing would be NaN
    scale = step.exp()
    e_sum = (scale * e).sum(0)
    log_sum = e_sum.log()
    exact = shift + log_sum
    logsumexp = exact.float()
    nothing = logsumexp[:0]
    return (
        logsumexp,
        (exact - logsumexp).float(),
        (log_sum - (scale * (ed + step * e)).sum(0) / e_sum).float() if want_entropy else nothing,
        ((scale.square() * e2).sum(0) / e_sum.square()).float() if want_sum_p2 else nothing,
    )


def rows_of(softcap: float) -> int:
    """Rows of a program; tanh takes registers."""
    return 64 if softcap else 128


def shares_of(V: int) -> tuple[int, int]:
    """Shares of the vocabulary and tiles in each: a function of V alone."""
    tiles = triton.cdiv(V, COLUMNS)
    share = triton.cdiv(tiles, min(SHARES, tiles))
    return triton.cdiv(tiles, share), share
