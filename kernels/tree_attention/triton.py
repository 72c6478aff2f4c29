"""Triton backend: forward, dQ and dK/dV over blocks of rows and blocks of keys.

    forward  S = scale q k^T (log2 domain), online softmax, out = P v, lse           reads the visible key blocks once
    dQ       delta = rowsum(dO * O), P = 2^(S - lse), dS = P (dO v^T - delta), dQ = scale dS k
    dK/dV    dV = P^T dO, dK = scale dS^T q, over all rows and query heads that read the key block

Row i sees key j iff j <= i < subtree_end[j], so of a pair of blocks the largest and smallest subtree_end of the keys
tell whether nothing, everything or a part of it is visible. Forward and dQ of a row block walk a list of its wholly
visible key blocks without a mask, then one of its partly visible ones with a compare (``visible_blocks``, on the
device, (T / block)^2 flags). The rows that see a key block are contiguous, from its first key to its largest
subtree_end, so dK/dV needs no list. Two deterministic passes instead of one with atomics; only lse and delta are kept.

T is a run-time value; compiled once for each head size, dtype, group and set of options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import interpreting
from .blocks import key_extents, padded_width, tiles_for, visible_blocks

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def _tanh(x):
    """tanh with a small relative error near 0 too."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    small = p * z * x + x
    magnitude = tl.minimum(tl.abs(x), 10.0)
    large = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))


@triton.jit
def _log2_scores(dot, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in the log2 domain, and the slope of the softcap there (1 without)."""
    if HAS_SOFTCAP:
        bent = _tanh(dot * (scale / softcap))
        return bent * (softcap * LOG2E), 1.0 - bent * bent
    else:
        return dot * (scale * LOG2E), 1.0


@triton.jit
def _seen(rows, keys, end, row_position, key_position, tokens, window, HAS_WINDOW: tl.constexpr):
    """Which of broadcast rows and keys see each other."""
    seen = (keys <= rows) & (rows < end) & (rows < tokens)
    if HAS_WINDOW:
        seen &= row_position - key_position < window
    return seen


@triton.jit
def _load(pointer, index, stride, columns, limit, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``index`` of a [*, DIM] head as [len(index), WIDTH], zeros outside."""
    pointers = pointer + index.to(tl.int64)[:, None] * stride + columns[None, :]
    if DIM == WIDTH:
        return tl.load(pointers, mask=(index < limit)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(index < limit)[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def _store(pointer, index, stride, columns, limit, value, DIM: tl.constexpr):
    pointers = pointer + index.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=(index < limit)[:, None] & (columns < DIM)[None, :])


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_blocks(
    acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, begin, stop,
    tokens, scale, window, softcap,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    for i in range(begin, stop):
        keys = tl.load(listed + i) * KEYS + tl.arange(0, KEYS)
        key = _load(k, keys, k_stride, columns, tokens, DIM, WIDTH)
        scores, _ = _log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            end = tl.load(ends + keys, mask=keys < tokens, other=0)
            key_position = tl.load(positions + keys, mask=keys < tokens, other=0) if HAS_WINDOW else keys
            seen = _seen(
                rows[:, None], keys[None, :], end[None, :], row_position[:, None], key_position[None, :],
                tokens, window, HAS_WINDOW,
            )  # fmt: skip
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing visible yet: 2^(-inf - 0) = 0
        probability = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(probability, 1)
        value = _load(v, keys, v_stride, columns, tokens, DIM, WIDTH)
        acc = tl.dot(probability.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "list_stride", "window"])
def forward_kernel(
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [T, Hq] fp32
    ends,  # [T] int32
    positions,  # [T] int32, read with a window only
    lists,  # [row blocks, list_stride] int32
    full_counts,  # [row blocks] int32
    counts,  # [row blocks] int32
    tokens, list_stride, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows tend to see most: they start first
    head = tl.program_id(1).to(tl.int64)
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = _load(q + head * q_head, rows, q_stride, columns, tokens, DIM, WIDTH)
    row_position = tl.load(positions + rows, mask=rows < tokens, other=0) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    listed = lists + block.to(tl.int64) * list_stride
    full, count = tl.load(full_counts + block), tl.load(counts + block)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, top, total = _forward_blocks(
        acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, 0, full,
        tokens, scale, window, softcap, DIM, WIDTH, KEYS, False, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    acc, top, total = _forward_blocks(
        acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, full, count,
        tokens, scale, window, softcap, DIM, WIDTH, KEYS, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    saw = total != 0.0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    _store(out + head * DIM, rows, HEADS * DIM, columns, tokens, acc, DIM)
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + rows.to(tl.int64) * HEADS + head, log_sum, mask=rows < tokens)


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_lse2(lse, rows, heads, tokens):
    """lse in the log2 domain; 0 where a row saw nothing, whose scores are all masked."""
    value = tl.load(lse + rows.to(tl.int64) * heads, mask=rows < tokens, other=0.0)
    return tl.where(value == -float("inf"), 0.0, value * LOG2E)


@triton.jit
def _dq_blocks(
    acc, query, grad, lse2, delta, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, begin, stop,
    tokens, scale, window, softcap,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    for i in range(begin, stop):
        keys = tl.load(listed + i) * KEYS + tl.arange(0, KEYS)
        key = _load(k, keys, k_stride, columns, tokens, DIM, WIDTH)
        value = _load(v, keys, v_stride, columns, tokens, DIM, WIDTH)
        scores, slope = _log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            end = tl.load(ends + keys, mask=keys < tokens, other=0)
            key_position = tl.load(positions + keys, mask=keys < tokens, other=0) if HAS_WINDOW else keys
            seen = _seen(
                rows[:, None], keys[None, :], end[None, :], row_position[:, None], key_position[None, :],
                tokens, window, HAS_WINDOW,
            )  # fmt: skip
            scores = tl.where(seen, scores, -float("inf"))
        probability = tl.exp2(scores - lse2[:, None])
        dscores = probability * (tl.dot(grad, value.T, input_precision="ieee") - delta[:, None]) * slope
        acc = tl.dot(dscores.to(key.dtype), key, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens", "list_stride", "window"])
def dq_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [T, Hq] fp32
    delta,  # [T, Hq] fp32, written for dkdv_kernel
    dq,  # [T, Hq, D]
    ends,  # [T] int32
    positions,  # [T] int32, read with a window only
    lists,  # [row blocks, list_stride] int32
    full_counts,  # [row blocks] int32
    counts,  # [row blocks] int32
    tokens, list_stride, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = _load(q + head * q_head, rows, q_stride, columns, tokens, DIM, WIDTH)
    grad = _load(grad_out + head * g_head, rows, g_stride, columns, tokens, DIM, WIDTH)
    output = _load(out + head * DIM, rows, HEADS * DIM, columns, tokens, DIM, WIDTH)
    row_delta = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta + rows.to(tl.int64) * HEADS + head, row_delta, mask=rows < tokens)
    lse2 = _load_lse2(lse + head, rows, HEADS, tokens)
    row_position = tl.load(positions + rows, mask=rows < tokens, other=0) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    listed = lists + block.to(tl.int64) * list_stride
    full, count = tl.load(full_counts + block), tl.load(counts + block)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    acc = _dq_blocks(
        acc, query, grad, lse2, row_delta, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed,
        0, full, tokens, scale, window, softcap, DIM, WIDTH, KEYS, False, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    acc = _dq_blocks(
        acc, query, grad, lse2, row_delta, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed,
        full, count, tokens, scale, window, softcap, DIM, WIDTH, KEYS, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    _store(dq + head * DIM, rows, HEADS * DIM, columns, tokens, acc * scale, DIM)


@triton.jit
def _dkdv_rows(
    dk, dv, key, value, q, grad_out, lse, delta, q_stride, q_head, g_stride, g_head,
    positions, keys, end, key_position, begin, before, gap, count, tokens, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds ``count`` row blocks of every query head, from ``begin`` on, ``gap`` missing after ``before``."""
    columns = tl.arange(0, WIDTH)
    for i in range(GROUP * count):
        head, step = i // count, i % count
        first = begin + step * ROWS + tl.where(step < before, 0, gap)
        rows = first + tl.arange(0, ROWS)
        query = _load(q + head.to(tl.int64) * q_head, rows, q_stride, columns, tokens, DIM, WIDTH)
        grad = _load(grad_out + head.to(tl.int64) * g_head, rows, g_stride, columns, tokens, DIM, WIDTH)
        lse2 = _load_lse2(lse + head, rows, HEADS, tokens)
        row_delta = tl.load(delta + head + rows.to(tl.int64) * HEADS, mask=rows < tokens, other=0.0)
        scores, slope = _log2_scores(tl.dot(key, query.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            row_position = tl.load(positions + rows, mask=rows < tokens, other=0) if HAS_WINDOW else rows
            seen = _seen(
                rows[None, :], keys[:, None], end[:, None], row_position[None, :], key_position[:, None],
                tokens, window, HAS_WINDOW,
            )  # fmt: skip
            scores = tl.where(seen, scores, -float("inf"))
        probability = tl.exp2(scores - lse2[None, :])  # [keys, rows]
        dv = tl.dot(probability.to(grad.dtype), grad, dv, input_precision="ieee")
        dscores = probability * (tl.dot(value, grad.T, input_precision="ieee") - row_delta[None, :]) * slope
        dk = tl.dot(dscores.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "window"])
def dkdv_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    lse,  # [T, Hq] fp32
    delta,  # [T, Hq] fp32
    dk_out,  # [T, Hkv, D]
    dv_out,  # [T, Hkv, D]
    ends,  # [T] int32
    positions,  # [T] int32, read with a window only
    lows,  # [key blocks] int32, smallest subtree_end
    highs,  # [key blocks] int32, largest subtree_end
    tokens, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # early keys tend to be seen by most rows: they start first
    kv_head = tl.program_id(1).to(tl.int64)
    keys, columns = block * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    key = _load(k + kv_head * k_head, keys, k_stride, columns, tokens, DIM, WIDTH)
    value = _load(v + kv_head * v_head, keys, v_stride, columns, tokens, DIM, WIDTH)
    end = tl.load(ends + keys, mask=keys < tokens, other=0)
    key_position = tl.load(positions + keys, mask=keys < tokens, other=0) if HAS_WINDOW else keys

    # Rows [begin, full_begin) cross the diagonal, [full_begin, full_end) see every key, [full_end, stop) see some.
    begin = block * KEYS // ROWS * ROWS
    stop = tl.minimum(tl.load(highs + block), tokens)
    full_begin = tl.cdiv(block * KEYS + KEYS - 1, ROWS) * ROWS
    full_end = full_begin
    if not HAS_WINDOW:
        full_end = tl.maximum(full_begin, tl.minimum(tl.load(lows + block), tokens) // ROWS * ROWS)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    # In units of row blocks: those of the middle unmasked, those before and behind it in one masked walk.
    before = tl.cdiv(tl.minimum(full_begin, stop) - begin, ROWS)
    middle = (full_end - full_begin) // ROWS
    behind = tl.cdiv(tl.maximum(stop - full_end, 0), ROWS)
    q += kv_head * GROUP * q_head
    grad_out += kv_head * GROUP * g_head
    dk, dv = _dkdv_rows(
        dk, dv, key, value, q, grad_out, lse + kv_head * GROUP, delta + kv_head * GROUP, q_stride, q_head,
        g_stride, g_head, positions, keys, end, key_position, full_begin, middle, 0, middle,
        tokens, scale, window, softcap,
        HEADS, GROUP, DIM, WIDTH, ROWS, False, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    dk, dv = _dkdv_rows(
        dk, dv, key, value, q, grad_out, lse + kv_head * GROUP, delta + kv_head * GROUP, q_stride, q_head,
        g_stride, g_head, positions, keys, end, key_position, begin, before, full_end - begin - before * ROWS,
        before + behind, tokens, scale, window, softcap,
        HEADS, GROUP, DIM, WIDTH, ROWS, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    kv_stride = HEADS // GROUP * DIM
    _store(dk_out + kv_head * DIM, keys, kv_stride, columns, tokens, dk * scale, DIM)
    _store(dv_out + kv_head * DIM, keys, kv_stride, columns, tokens, dv, DIM)


# ---- launches --------------------------------------------------------------------------------------------------------


def _bf16_interpreted(q: Tensor) -> bool:
    """Triton's interpreter multiplies the bit patterns of bf16 operands; there the kernels run in fp32."""
    return interpreting() and q.dtype == torch.bfloat16


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    subtree_end: Tensor,  # [T] int32
    position: Tensor | None,  # [T] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if _bf16_interpreted(q):
        wide = q.float(), k.float(), v.float()
        out, lse = tree_attention_forward(*wide, subtree_end, position, scale, window, softcap)
        return out.to(q.dtype), lse
    tokens, heads, dim = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0:
        return out, lse
    width, tile = padded_width(dim), tiles_for(dim, q.dtype).forward
    lists, full_counts, counts = visible_blocks(subtree_end, position, window, tile)
    forward_kernel[(triton.cdiv(tokens, tile.rows), heads)](
        q, k, v, out, lse, subtree_end, subtree_end if position is None else position, lists, full_counts, counts,
        tokens, lists.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale, window or 0, softcap or 0.0,
        HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, WIDTH=width, ROWS=tile.rows, KEYS=tile.keys,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, num_warps=tile.warps, num_stages=2,
    )  # fmt: skip
    return out, lse


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [T, Hq]
    subtree_end: Tensor,  # [T] int32
    position: Tensor | None,  # [T] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _bf16_interpreted(q):
        wide = grad_out.float(), q.float(), k.float(), v.float(), out.float()
        grads = tree_attention_backward(*wide, lse, subtree_end, position, scale, window, softcap)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    tokens, heads, dim = q.shape
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if tokens == 0:
        return dq, dk, dv
    out, lse = out.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    tiles = tiles_for(dim, q.dtype)
    lists, full_counts, counts = visible_blocks(subtree_end, position, window, tiles.dq)
    lows, highs = key_extents(subtree_end, tiles.dkdv.keys)
    positions = subtree_end if position is None else position
    strides = [s for t in (grad_out, q, k, v) for s in t.stride()[:2]]
    options = {
        "HEADS": heads, "GROUP": heads // k.shape[1], "DIM": dim, "WIDTH": padded_width(dim),
        "HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None, "num_stages": 2,
    }  # fmt: skip
    dq_kernel[(triton.cdiv(tokens, tiles.dq.rows), heads)](
        grad_out, q, k, v, out, lse, delta, dq, subtree_end, positions, lists, full_counts, counts,
        tokens, lists.stride(0), *strides, scale, window or 0, softcap or 0.0,
        ROWS=tiles.dq.rows, KEYS=tiles.dq.keys, num_warps=tiles.dq.warps, **options,
    )  # fmt: skip
    dkdv_kernel[(triton.cdiv(tokens, tiles.dkdv.keys), k.shape[1])](
        grad_out, q, k, v, lse, delta, dk, dv, subtree_end, positions, lows, highs,
        tokens, *strides, scale, window or 0, softcap or 0.0,
        ROWS=tiles.dkdv.rows, KEYS=tiles.dkdv.keys, num_warps=tiles.dkdv.warps, **options,
    )  # fmt: skip
    return dq, dk, dv
