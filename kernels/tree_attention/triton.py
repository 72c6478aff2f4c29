"""Triton backend: forward, dQ and dK/dV over blocks of rows and blocks of keys.

    forward  S = scale q k^T (log2 domain), online softmax, out = P v, lse           reads the visible key blocks once
    dQ       delta = rowsum(dO * O), P = 2^(S - lse), dS = P (dO v^T - delta), dQ = scale dS k
    dK/dV    dV = P^T dO, dK = scale dS^T q, over all rows and query heads that read the key block

Row i sees key j iff j <= i < subtree_end[j]. A block of rows walks the runs of key blocks that it sees wholly without a
mask, then those it sees in part with a compare; dK/dV walks runs of row blocks in the same way (`runs`). Two
deterministic passes instead of one with atomics; only lse and delta are kept. Heavy blocks start first.

The T rows of q are the last of N: the first ``offset`` = N - T keys belong to an earlier piece of the tree. Rows and
keys are numbered alike, from the first key on.

T and N are run-time values; compiled once for each head size, dtype, group and set of options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import interpreting
from .blocks import Tiles, padded_width, tiles_for
from .runs import CAPACITY, visible_runs

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
def log2_scores(dot, scale, softcap, HAS_SOFTCAP: tl.constexpr):
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
def _from_row_zero(pointer, offset, stride):
    """Where row 0 would be, for a tensor whose first row is row ``offset``."""
    return pointer - offset.to(tl.int64) * stride


@triton.jit
def _store(pointer, index, stride, columns, limit, value, DIM: tl.constexpr):
    pointers = pointer + index.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, value.to(pointer.dtype.element_ty), mask=(index < limit)[:, None] & (columns < DIM)[None, :])


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_blocks(
    acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position, begin, stop, tokens,
    scale, window, softcap,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    for i in range(begin, stop):
        keys = i * KEYS + tl.arange(0, KEYS)
        key = _load(k, keys, k_stride, columns, tokens, DIM, WIDTH)
        scores, _ = log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
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


@triton.jit(do_not_specialize=["tokens", "offset", "window"])
def forward_kernel(
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [T, Hq] fp32
    ends,  # [N] int32
    positions,  # [N] int32, read with a window only
    runs,  # [row blocks, 2 CAPACITY + 1, 2] int32, of key blocks
    full_counts,  # [row blocks] int32
    partial_counts,  # [row blocks] int32
    order,  # [row blocks] int32
    tokens, offset, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.load(order + tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    rows, columns = offset + block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q = _from_row_zero(q, offset, q_stride) + head * q_head
    out = _from_row_zero(out, offset, HEADS * DIM) + head * DIM
    lse = _from_row_zero(lse, offset, HEADS) + head
    query = _load(q, rows, q_stride, columns, tokens, DIM, WIDTH)
    row_position = tl.load(positions + rows, mask=rows < tokens, other=0) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    full_runs = runs + block.to(tl.int64) * (4 * CAPACITY + 2)
    partial_runs = full_runs + 2 * CAPACITY
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for run in tl.range(tl.load(full_counts + block), num_stages=1):
        acc, top, total = _forward_blocks(
            acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position,
            tl.load(full_runs + 2 * run), tl.load(full_runs + 2 * run + 1),
            tokens, scale, window, softcap, DIM, WIDTH, KEYS, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    for run in tl.range(tl.load(partial_counts + block), num_stages=1):
        acc, top, total = _forward_blocks(
            acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position,
            tl.load(partial_runs + 2 * run), tl.load(partial_runs + 2 * run + 1),
            tokens, scale, window, softcap, DIM, WIDTH, KEYS, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    saw = total != 0.0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    _store(out, rows, HEADS * DIM, columns, tokens, acc, DIM)
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + rows.to(tl.int64) * HEADS, log_sum, mask=rows < tokens)


# ---- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_lse2(lse, rows, heads, tokens):
    """lse in the log2 domain; 0 where a row saw nothing, whose scores are all masked."""
    value = tl.load(lse + rows.to(tl.int64) * heads, mask=rows < tokens, other=0.0)
    return tl.where(value == -float("inf"), 0.0, value * LOG2E)


@triton.jit
def _dq_blocks(
    acc, query, grad, lse2, delta, k, v, k_stride, v_stride, ends, positions, rows, row_position, begin, stop, tokens,
    scale, window, softcap,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    for i in range(begin, stop):
        keys = i * KEYS + tl.arange(0, KEYS)
        key = _load(k, keys, k_stride, columns, tokens, DIM, WIDTH)
        value = _load(v, keys, v_stride, columns, tokens, DIM, WIDTH)
        scores, slope = log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
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


@triton.jit(do_not_specialize=["tokens", "offset", "window"])
def dq_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [T, Hq] fp32
    delta,  # [T, Hq] fp32, written for dkdv_kernel
    dq,  # [T, Hq, D]
    ends,  # [N] int32
    positions,  # [N] int32, read with a window only
    runs,  # [row blocks, 2 CAPACITY + 1, 2] int32, of key blocks
    full_counts,  # [row blocks] int32
    partial_counts,  # [row blocks] int32
    order,  # [row blocks] int32
    tokens, offset, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.load(order + tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    rows, columns = offset + block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q = _from_row_zero(q, offset, q_stride) + head * q_head
    grad_out = _from_row_zero(grad_out, offset, g_stride) + head * g_head
    out = _from_row_zero(out, offset, HEADS * DIM) + head * DIM
    dq = _from_row_zero(dq, offset, HEADS * DIM) + head * DIM
    lse = _from_row_zero(lse, offset, HEADS) + head
    delta = _from_row_zero(delta, offset, HEADS) + head
    query = _load(q, rows, q_stride, columns, tokens, DIM, WIDTH)
    grad = _load(grad_out, rows, g_stride, columns, tokens, DIM, WIDTH)
    output = _load(out, rows, HEADS * DIM, columns, tokens, DIM, WIDTH)
    row_delta = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(delta + rows.to(tl.int64) * HEADS, row_delta, mask=rows < tokens)
    lse2 = _load_lse2(lse, rows, HEADS, tokens)
    row_position = tl.load(positions + rows, mask=rows < tokens, other=0) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    full_runs = runs + block.to(tl.int64) * (4 * CAPACITY + 2)
    partial_runs = full_runs + 2 * CAPACITY
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for run in tl.range(tl.load(full_counts + block), num_stages=1):
        acc = _dq_blocks(
            acc, query, grad, lse2, row_delta, k, v, k_stride, v_stride, ends, positions, rows, row_position,
            tl.load(full_runs + 2 * run), tl.load(full_runs + 2 * run + 1),
            tokens, scale, window, softcap, DIM, WIDTH, KEYS, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    for run in tl.range(tl.load(partial_counts + block), num_stages=1):
        acc = _dq_blocks(
            acc, query, grad, lse2, row_delta, k, v, k_stride, v_stride, ends, positions, rows, row_position,
            tl.load(partial_runs + 2 * run), tl.load(partial_runs + 2 * run + 1),
            tokens, scale, window, softcap, DIM, WIDTH, KEYS, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    _store(dq, rows, HEADS * DIM, columns, tokens, acc * scale, DIM)


@triton.jit
def _dkdv_rows(
    dk, dv, key, value, q, grad_out, lse, delta, q_stride, g_stride,
    positions, keys, end, key_position, begin, stop, tokens, offset, scale, window, softcap,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds row blocks ``begin`` to ``stop`` of one query head."""
    columns = tl.arange(0, WIDTH)
    for i in range(begin, stop):
        rows = offset + i * ROWS + tl.arange(0, ROWS)
        query = _load(q, rows, q_stride, columns, tokens, DIM, WIDTH)
        grad = _load(grad_out, rows, g_stride, columns, tokens, DIM, WIDTH)
        lse2 = _load_lse2(lse, rows, HEADS, tokens)
        row_delta = tl.load(delta + rows.to(tl.int64) * HEADS, mask=rows < tokens, other=0.0)
        scores, slope = log2_scores(tl.dot(key, query.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
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


@triton.jit(do_not_specialize=["tokens", "offset", "window"])
def dkdv_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    lse,  # [T, Hq] fp32
    delta,  # [T, Hq] fp32
    dk_out,  # [N, Hkv, D]
    dv_out,  # [N, Hkv, D]
    ends,  # [N] int32
    positions,  # [N] int32, read with a window only
    runs,  # [key blocks, 2 CAPACITY + 1, 2] int32, of row blocks
    full_counts,  # [key blocks] int32
    partial_counts,  # [key blocks] int32
    order,  # [key blocks] int32
    tokens, offset, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    block = tl.load(order + tl.program_id(0))
    kv_head = tl.program_id(1).to(tl.int64)
    keys, columns = block * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    key = _load(k + kv_head * k_head, keys, k_stride, columns, tokens, DIM, WIDTH)
    value = _load(v + kv_head * v_head, keys, v_stride, columns, tokens, DIM, WIDTH)
    end = tl.load(ends + keys, mask=keys < tokens, other=0)
    key_position = tl.load(positions + keys, mask=keys < tokens, other=0) if HAS_WINDOW else keys
    first_head = kv_head * GROUP
    q = _from_row_zero(q, offset, q_stride) + first_head * q_head
    grad_out = _from_row_zero(grad_out, offset, g_stride) + first_head * g_head
    lse = _from_row_zero(lse, offset, HEADS) + first_head
    delta = _from_row_zero(delta, offset, HEADS) + first_head
    full_runs = runs + block.to(tl.int64) * (4 * CAPACITY + 2)
    partial_runs = full_runs + 2 * CAPACITY
    full_count, partial_count = tl.load(full_counts + block), tl.load(partial_counts + block)
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    for i in tl.range(GROUP * full_count, num_stages=1):
        head, run = (i // full_count).to(tl.int64), i % full_count
        dk, dv = _dkdv_rows(
            dk, dv, key, value, q + head * q_head, grad_out + head * g_head, lse + head, delta + head,
            q_stride, g_stride, positions, keys, end, key_position,
            tl.load(full_runs + 2 * run), tl.load(full_runs + 2 * run + 1),
            tokens, offset, scale, window, softcap, HEADS, DIM, WIDTH, ROWS, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    for i in tl.range(GROUP * partial_count, num_stages=1):
        head, run = (i // partial_count).to(tl.int64), i % partial_count
        dk, dv = _dkdv_rows(
            dk, dv, key, value, q + head * q_head, grad_out + head * g_head, lse + head, delta + head,
            q_stride, g_stride, positions, keys, end, key_position,
            tl.load(partial_runs + 2 * run), tl.load(partial_runs + 2 * run + 1),
            tokens, offset, scale, window, softcap, HEADS, DIM, WIDTH, ROWS, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    kv_stride = HEADS // GROUP * DIM
    _store(dk_out + kv_head * DIM, keys, kv_stride, columns, tokens, dk * scale, DIM)
    _store(dv_out + kv_head * DIM, keys, kv_stride, columns, tokens, dv, DIM)


# ---- launches --------------------------------------------------------------------------------------------------------


def _tiles(q: Tensor, softcap: float | None) -> Tiles:
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9  # in the interpreter any will do
    return tiles_for(q.shape[2], q.dtype, major=major, softcap=softcap is not None)


def _bf16_interpreted(q: Tensor) -> bool:
    """Triton's interpreter multiplies the bit patterns of bf16 operands; there the kernels run in fp32."""
    return interpreting() and q.dtype == torch.bfloat16


def tree_attention_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    if _bf16_interpreted(q):
        wide = q.float(), k.float(), v.float()
        out, lse = tree_attention_forward(*wide, subtree_end, position, scale, window, softcap)
        return out.to(q.dtype), lse
    rows, heads, dim = q.shape
    tokens, offset = len(k), len(k) - rows
    out = q.new_empty(q.shape)
    lse = q.new_empty((rows, heads), dtype=torch.float32)
    if rows == 0:
        return out, lse
    width, tile = padded_width(dim), _tiles(q, softcap).forward
    runs = visible_runs(subtree_end, position, window, tile, offset, by_key=False)
    forward_kernel[(triton.cdiv(rows, tile.rows), heads)](
        q, k, v, out, lse, subtree_end, subtree_end if position is None else position, *runs,
        tokens, offset, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale, window or 0, softcap or 0.0,
        HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, WIDTH=width, CAPACITY=CAPACITY, ROWS=tile.rows, KEYS=tile.keys,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, num_warps=tile.warps, num_stages=2,
    )  # fmt: skip
    return out, lse


def tree_attention_backward(
    grad_out: Tensor,  # [T, Hq, D]
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [N, Hkv, D]
    v: Tensor,  # [N, Hkv, D]
    out: Tensor,  # [T, Hq, D]
    lse: Tensor,  # [T, Hq]
    subtree_end: Tensor,  # [N] int32
    position: Tensor | None,  # [N] int32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _bf16_interpreted(q):
        wide = grad_out.float(), q.float(), k.float(), v.float(), out.float()
        grads = tree_attention_backward(*wide, lse, subtree_end, position, scale, window, softcap)
        return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype)
    rows, heads, dim = q.shape
    tokens, offset = len(k), len(k) - rows
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if rows == 0:
        return dq, dk.zero_(), dv.zero_()
    out, lse = out.contiguous(), lse.contiguous()
    delta = torch.empty_like(lse)
    tiles = _tiles(q, softcap)
    of_rows = visible_runs(subtree_end, position, window, tiles.dq, offset, by_key=False)
    of_keys = visible_runs(subtree_end, position, window, tiles.dkdv, offset, by_key=True)
    positions = subtree_end if position is None else position
    strides = [s for t in (grad_out, q, k, v) for s in t.stride()[:2]]
    options = {
        "HEADS": heads, "GROUP": heads // k.shape[1], "DIM": dim, "WIDTH": padded_width(dim),
        "CAPACITY": CAPACITY,
        "HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None, "num_stages": 2,
    }  # fmt: skip
    dq_kernel[(triton.cdiv(rows, tiles.dq.rows), heads)](
        grad_out, q, k, v, out, lse, delta, dq, subtree_end, positions, *of_rows, tokens, offset, *strides,
        scale, window or 0, softcap or 0.0,
        ROWS=tiles.dq.rows, KEYS=tiles.dq.keys, num_warps=tiles.dq.warps, **options,
    )  # fmt: skip
    dkdv_kernel[(triton.cdiv(tokens, tiles.dkdv.keys), k.shape[1])](
        grad_out, q, k, v, lse, delta, dk, dv, subtree_end, positions, *of_keys, tokens, offset, *strides,
        scale, window or 0, softcap or 0.0,
        ROWS=tiles.dkdv.rows, KEYS=tiles.dkdv.keys, num_warps=tiles.dkdv.warps, **options,
    )  # fmt: skip
    return dq, dk, dv
