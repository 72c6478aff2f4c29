"""Kernels of the gradients of queries, keys, decays and beta, given the states and their gradients of all chunks.

One program a chunk, head and block of key channels; nothing depends on the tree. With S the state at the chunk's
beginning, dS' the gradient of that at its end, and the letters of `triton_scan`,

    W_ij  = scale (dout_i . new_j) exp(G_i - G_j)   for j <= i          M_ij = (dx_i . new_j) exp(G_i - G_j)   for j < i
    dq_i  = scale e^(G_i) S dout_i + sum_j W_ij k_j
    row_i = -e^(G_i) S dx_i - sum_j M_ij k_j                            of a key that removes, by its beta
    col_j = e^(Z_j) dS' new_j + sum_i (W_ij q_i - beta_i M_ij k_i)      of a key that is written
    dk = beta row + col                                                 dbeta = dx . v + k . row
    dG = q dq + beta k row - k col, and to the last row's is added k e^Z dS' new + e^(G_n) (S dS')

The gradient of the inverse needs no inverse: d system = -dx new^T. That of a row's decay is the sum of dG over the
chunk's rows from there on; it has one number a channel, or their sum. Where channels have decays of their own, the sums
over rows of the chunk are made before (`triton_channels`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import channel_decays, decays, load_rows, load_tile, store_tile


@triton.jit
def _sums_of_values(
    grad_out, new, grad_x, value, starts, grad_ends, first, at, place, head, part, count, columns, v_row, v_head,
    HEADS: tl.constexpr, PART: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return what sums over the values: ``dout S^T``, ``new dS'^T`` and ``dx S^T`` [CHUNK, PART], ``dout new^T`` and
    ``dx new^T`` [CHUNK, CHUNK] (0 with CHANNELS), ``S dS'`` before its sum [PART, BLOCK], and ``dx . v`` [CHUNK]."""
    dq = tl.zeros([CHUNK, PART], tl.float32)
    dcol = tl.zeros([CHUNK, PART], tl.float32)
    drow = tl.zeros([CHUNK, PART], tl.float32)
    written = tl.zeros([CHUNK, CHUNK], tl.float32)
    removed = tl.zeros([CHUNK, CHUNK], tl.float32)
    kept = tl.zeros([PART, BLOCK], tl.float32)
    dbeta = tl.zeros([CHUNK], tl.float32)
    for v in range(0, VALUES, BLOCK):
        of = at * VALUES + v
        do = load_tile(grad_out + of, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK)
        n = load_tile(new + of, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK)
        state = load_tile(starts + place + v, VALUES, columns, VALUES - v, PART, BLOCK)
        dstate = load_tile(grad_ends + place + v, VALUES, columns, VALUES - v, PART, BLOCK)
        if not CHANNELS:
            written = tl.dot(do, tl.trans(n), written, input_precision="ieee")
        dq = tl.dot(do, tl.trans(state), dq, input_precision="ieee")
        dcol = tl.dot(n, tl.trans(dstate), dcol, input_precision="ieee")
        kept += state.to(tl.float32) * dstate
        if DELTA:
            dx = load_tile(grad_x + of, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK)
            drow = tl.dot(dx, tl.trans(state), drow, input_precision="ieee")
            if not CHANNELS:
                removed = tl.dot(dx, tl.trans(n), removed, input_precision="ieee")
            if part == 0:
                x = load_tile(value + first * v_row + head * v_head + v, v_row, count, VALUES - v, CHUNK, BLOCK)
                dbeta += tl.sum(dx.to(tl.float32) * x, 1)
    return dq, dcol, drow, written, removed, kept, dbeta


@triton.jit
def _add_rows(dq, dcol, drow, q, k, b, written, removed, total, scale, CHUNK: tl.constexpr, DELTA: tl.constexpr):
    """Add the sums over the chunk's rows to dq, col and row, with one decay a head."""
    dtype = k.dtype
    numbers = tl.arange(0, CHUNK)
    row, column = numbers[:, None], numbers[None, :]
    decayed = tl.exp(tl.where(column <= row, total - tl.trans(total), -float("inf")))
    of_query = (written * decayed * scale).to(dtype)
    dq = tl.dot(of_query, k, dq, input_precision="ieee")
    dcol = tl.dot(tl.trans(of_query), q, dcol, input_precision="ieee")
    if DELTA:
        of_key = tl.where(column < row, -removed * decayed, 0.0)
        drow = tl.dot(of_key.to(dtype), k, drow, input_precision="ieee")
        dcol = tl.dot(tl.trans((of_key * b).to(dtype)), k, dcol, input_precision="ieee")
    return dq, dcol, drow


@triton.jit(do_not_specialize=["part_stride"])
def gradients_kernel(
    grad_out,  # [T, HEADS, VALUES]
    query,  # [T, G, DIM]
    key,  # [T, G, DIM]
    value,  # [T, HEADS, VALUES], read with DELTA only
    decay,  # [T, HEADS] or [T, HEADS, DIM] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    new,  # [T, HEADS, VALUES]
    grad_x,  # [T, HEADS, VALUES], read with DELTA only
    starts,  # [C, HEADS, DIM, VALUES]
    grad_ends,  # [C, HEADS, DIM, VALUES]
    grad_query,  # [T, HEADS, DIM] fp32; with CHANNELS it has the sums over j when it begins
    grad_key,  # [T, HEADS, DIM] fp32; likewise, of col
    grad_removed,  # [T, HEADS, DIM] fp32, likewise, of row; with CHANNELS and DELTA only
    grad_decay,  # [parts, T, HEADS] fp32, or [T, HEADS, DIM]
    grad_beta,  # [parts, T, HEADS] fp32, written with DELTA only
    chunk_row,  # [C] int32
    chunk_rows,  # [C] int32
    part_stride,  # T HEADS
    q_row, q_head, k_row, k_head, v_row, v_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    chunk, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, count = tl.load(chunk_row + chunk).to(tl.int64), tl.load(chunk_rows + chunk)
    begin = part * PART
    columns = DIM - begin
    at, place = first * HEADS + head, (chunk * HEADS + head) * (DIM * VALUES) + begin * VALUES
    numbers = tl.arange(0, CHUNK)
    if CHANNELS:
        total, last = channel_decays(decay + begin, at, count, columns, HEADS, DIM, PART, CHUNK)
    else:
        total, last = decays(decay, at, count, HEADS, CHUNK)
    dq, dcol, drow, written, removed, kept, dbeta = _sums_of_values(
        grad_out, new, grad_x, value, starts, grad_ends, first, at, place, head, part, count, columns, v_row, v_head,
        HEADS, PART, VALUES, BLOCK, CHUNK, DELTA, CHANNELS,
    )  # fmt: skip

    q = load_tile(query + first * q_row + head // GROUP * q_head + begin, q_row, count, columns, CHUNK, PART)
    k = load_tile(key + first * k_row + head // GROUP * k_head + begin, k_row, count, columns, CHUNK, PART)
    from_start, own_columns = tl.exp(total), at * DIM + begin
    dq *= from_start * scale
    dcol *= tl.exp(last - total)
    drow *= -from_start
    b = load_rows(beta + at, HEADS, count, CHUNK)[:, None] if DELTA else 0.0
    ended = tl.sum(k * dcol, 0) + tl.sum(kept, 1) * tl.exp(tl.sum(tl.broadcast_to(last, [1, PART]), 0))
    if CHANNELS:
        dq += load_tile(grad_query + own_columns, HEADS * DIM, count, columns, CHUNK, PART)
        dcol += load_tile(grad_key + own_columns, HEADS * DIM, count, columns, CHUNK, PART)
        if DELTA:
            drow += load_tile(grad_removed + own_columns, HEADS * DIM, count, columns, CHUNK, PART)
        tl.debug_barrier()  # other threads store there
    else:
        dq, dcol, drow = _add_rows(dq, dcol, drow, q, k, b, written, removed, total, scale, CHUNK, DELTA)
    ddecay = q * dq - k * dcol
    dk = dcol
    if DELTA:
        dk += b * drow
        ddecay += b * (k * drow)
        dbeta += tl.sum(k * drow, 1)
        tl.store(grad_beta + part * part_stride + at + numbers * HEADS, dbeta, mask=numbers < count)
    store_tile(grad_query + own_columns, HEADS * DIM, count, columns, dq, CHUNK, PART)
    store_tile(grad_key + own_columns, HEADS * DIM, count, columns, dk, CHUNK, PART)
    if CHANNELS:
        ddecay = tl.cumsum(ddecay, 0, reverse=True) + ended[None, :]
        store_tile(grad_decay + own_columns, HEADS * DIM, count, columns, ddecay, CHUNK, PART)
    else:
        of_rows = tl.cumsum(tl.sum(ddecay, 1), 0, reverse=True) + tl.sum(ended[None, :], 1)  # as rows: Triton 3.6
        tl.store(grad_decay + part * part_stride + at + numbers * HEADS, of_rows, mask=numbers < count)
