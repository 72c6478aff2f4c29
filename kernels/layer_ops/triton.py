"""Triton backend: each op, and each gradient, is one pass over its rows.

    norm      a tile of whole rows a program; x is read and the norm written, 4 bytes a number of bf16
    its gradient  TILES tiles a program: dy and x are read and dx written, 6 bytes a number of bf16; the
              weight's gradient is summed in fp32 over the program's rows, and then over programs, in their order
    rotate    the heads of a position a program: x is read and written, 4 bytes a number; its angles are read once
    silu_mul  a block of numbers a program: 6 bytes a number of bf16; its gradient 10

How rows are cut depends on their length alone and nothing is added atomically. Numbers are rounded where Transformers'
modules round them, and nothing is contracted (``enable_fp_fusion=False``), so forwards equal theirs bit by bit except
for the order of a row's sum and for e^x.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers of a norm's tile, if a row is no longer
TILES = 16  # of a program of the norm's gradient
BLOCK = 1024  # numbers of a program of silu_mul
WARP_NUMBERS = 512  # of a tile, for which a warp is added


@triton.jit(do_not_specialize=["N"])
def norm_kernel(
    x,  # [N, H]
    weight,  # [H]
    out,  # [N, H]
    factor,  # [N] fp32
    N,
    H,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, inside = row[:, None] * H + column[None, :], (row < N)[:, None] & (column < H)[None, :]
    loaded = tl.load(x + at, mask=inside, other=0.0)
    wide = loaded.to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / H + eps)
    tl.store(factor + row, r, mask=row < N)
    normed = (wide * r[:, None]).to(loaded.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + at, (scale[None, :] * normed).to(loaded.dtype), mask=inside)


@triton.jit(do_not_specialize=["N"])
def norm_gradient_kernel(
    dy,  # [N, H]
    x,  # [N, H]
    weight,  # [H]
    factor,  # [N] fp32
    dx,  # [N, H]
    partial,  # [programs, H] fp32, or None
    N,
    H,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    scale = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * H + column[None, :], (row < N)[:, None] & (column < H)[None, :]
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(factor + row, mask=row < N, other=0.0)[:, None]
        g = grad * scale
        along = (tl.sum(g * wide, 1) / H)[:, None] * r * r
        tl.store(dx + at, (r * (g - wide * along)).to(dx.dtype.element_ty), mask=inside)
        if partial is not None:
            sums += grad * (wide * r)
    if partial is not None:
        tl.store(partial + tl.program_id(0).to(tl.int64) * H + column, tl.sum(sums, 0), mask=column < H)


@triton.jit
def _turn(x, out, low_cos, high_cos, low_sin, high_sin, head, HEADS, HALF, x_head, out_head, BACK: tl.constexpr):
    half = tl.arange(0, low_cos.shape[1])[None, :]
    inside = (head < HEADS) & (half < HALF)
    low = tl.load(x + head * x_head + half, mask=inside, other=0.0)
    high = tl.load(x + head * x_head + half + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if BACK:  # rounded once
        turned_low = low * low_cos + high * high_sin
        turned_high = high * high_cos - low * low_sin
    else:
        turned_low = (low * low_cos).to(dtype).to(tl.float32) - (high * low_sin).to(dtype).to(tl.float32)
        turned_high = (high * high_cos).to(dtype).to(tl.float32) + (low * high_sin).to(dtype).to(tl.float32)
    tl.store(out + head * out_head + half, turned_low.to(dtype), mask=inside)
    tl.store(out + head * out_head + half + HALF, turned_high.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens", "cos_batch", "q_batch", "k_batch", "q_out_batch", "k_out_batch"])
def rotate_kernel(
    q,  # [B, Hq, T, D]
    k,  # [B, Hkv, T, D]
    cos,  # [B or 1, T, D]
    sin,  # [B or 1, T, D]
    q_out,
    k_out,
    tokens,
    cos_batch,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    HALF,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, t = row // tokens, row % tokens
    half = tl.arange(0, WIDTH)[None, :]
    at = b * cos_batch + t * 2 * HALF + half
    low_cos = tl.load(cos + at, mask=half < HALF, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + at + HALF, mask=half < HALF, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + at, mask=half < HALF, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + at + HALF, mask=half < HALF, other=0.0).to(tl.float32)
    for begin in tl.static_range(0, Q_HEADS, Q_TILE):
        _turn(
            q + b * q_batch + t * q_token, q_out + b * q_out_batch + t * q_out_token,
            low_cos, high_cos, low_sin, high_sin, begin + tl.arange(0, Q_TILE)[:, None], Q_HEADS, HALF,
            q_head, q_out_head, BACK,
        )  # fmt: skip
    for begin in tl.static_range(0, K_HEADS, K_TILE):
        _turn(
            k + b * k_batch + t * k_token, k_out + b * k_out_batch + t * k_out_token,
            low_cos, high_cos, low_sin, high_sin, begin + tl.arange(0, K_TILE)[:, None], K_HEADS, HALF,
            k_head, k_out_head, BACK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def silu_mul_kernel(gate, up, out, M, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + i, mask=i < M, other=0.0), tl.load(up + i, mask=i < M, other=0.0)
    x = g.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    tl.store(out + i, (silu * u.to(tl.float32)).to(g.dtype), mask=i < M)


@triton.jit(do_not_specialize=["M"])
def silu_mul_gradient_kernel(dy, gate, up, dgate, dup, M, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(dy + i, mask=i < M, other=0.0).to(tl.float32)
    x = tl.load(gate + i, mask=i < M, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=i < M, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(dgate + i, (grad * u * (s * (1.0 + x * (1.0 - s)))).to(dgate.dtype.element_ty), mask=i < M)
    tl.store(dup + i, (grad * (x * s)).to(dup.dtype.element_ty), mask=i < M)


def tile_of(width: int) -> dict[str, int]:
    """Return how many rows of a norm are in a tile, their width as a power of two, and warps."""
    wide = triton.next_power_of_2(width)
    rows = max(TILE // wide, 1)
    return {"ROWS": rows, "WIDTH": wide, "num_warps": min(max(rows * wide // WARP_NUMBERS, 1), 16)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # [N, H], [H] -> [N, H], [N]
    rows, width = x.shape
    out, factor = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    tile = tile_of(width)
    if rows:
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        norm_kernel[grid](x, weight, out, factor, rows, width, eps, **tile, enable_fp_fusion=False)
    return out, factor


def rms_norm_backward(
    dy: Tensor,  # [N, H]
    x: Tensor,  # [N, H]
    weight: Tensor,  # [H]
    factor: Tensor,  # [N]
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    dx, tile = torch.empty_like(x), tile_of(width)
    programs = triton.cdiv(rows, tile["ROWS"] * TILES)
    partial = x.new_empty((programs, width), dtype=torch.float32) if need_weight else None
    if rows:
        norm_gradient_kernel[(programs,)](
            dy, x, weight, factor, dx, partial, rows, width, **tile, TILES=TILES, enable_fp_fusion=False
        )
    return dx, weight.new_empty(0) if partial is None else partial.sum(0).to(weight.dtype)


def rotate(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    cos: Tensor,  # [B or 1, T, D]
    sin: Tensor,  # [B or 1, T, D]
    back: bool,
) -> tuple[Tensor, Tensor]:
    batch, _, tokens, dim = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    strides = [stride for t in (q, k, q_out, k_out) for stride in t.stride()[:3]]
    if batch * tokens:
        rotate_kernel[(batch * tokens,)](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            tokens,
            0 if len(cos) == 1 else cos.stride(0),
            *strides,
            dim // 2,
            **heads_of(q.shape[1], k.shape[1], dim),
            BACK=back,
            enable_fp_fusion=False,
        )
    return q_out, k_out


def heads_of(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """Return how many heads are rotated at once, and half a head as a power of two."""
    wide = triton.next_power_of_2(max(dim // 2, 1))
    most = max(TILE // wide, 1)
    tiles = [min(triton.next_power_of_2(max(h, 1)), most) for h in (heads, kv_heads)]
    return {"Q_HEADS": heads, "K_HEADS": kv_heads, "Q_TILE": tiles[0], "K_TILE": tiles[1], "WIDTH": wide}


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        silu_mul_kernel[(triton.cdiv(count, BLOCK),)](gate, up, out, count, BLOCK=BLOCK, enable_fp_fusion=False)
    return out


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        grid = (triton.cdiv(count, BLOCK),)
        silu_mul_gradient_kernel[grid](dy, gate, up, dgate, dup, count, BLOCK=BLOCK, enable_fp_fusion=False)
    return dgate, dup
