"""Kernels of the chunks where each channel of a key has a decay of its own (Kimi, arXiv 2510.26692).

``sum_d q_id k_jd exp(G_id - G_jd)`` is no product of two matrices that both stay in range. Between blocks of 16 rows
it is: one factor decays from the block's edge to row i, the other from row j to that edge, so none is above 1. Within a
block it is summed up row by row. Decays are counted from the edges, so none is the difference of two large numbers.

One program a chunk, head and block of rows. It also writes what the pass over states multiplies, so that decays of
single channels are computed once, and not by each block of values. Otherwise all is as with one decay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_chunks import BLOCK
from .triton_tiles import channel_decays, load_rows, load_tile, store_tile


@triton.jit
def _row(tile, i):
    """Return row i of a tile [BLOCK, WIDTH] as [1, WIDTH]."""
    return tl.sum(tl.where(tl.arange(0, BLOCK)[:, None] == i, tile, 0.0), 0)[None, :]


@triton.jit
def _pairs_within_block(q, k, total, DELTA: tl.constexpr):
    """Return ``sum_d q_id k_jd exp(G_id - G_jd)`` of the rows of one block, and with DELTA that of keys and keys."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    of_query = tl.zeros([BLOCK, BLOCK], tl.float32)
    of_key = tl.zeros([BLOCK, BLOCK], tl.float32)
    for j in range(BLOCK):
        # the future is masked before exp, where it would overflow
        seen = _row(k.to(tl.float32), j) * tl.exp(tl.where(row >= j, total - _row(total, j), -float("inf")))
        of_query = tl.where(column == j, tl.sum(q * seen, 1)[:, None], of_query)
        if DELTA:
            of_key = tl.where(column == j, tl.sum(k * seen, 1)[:, None], of_key)
    return of_query, of_key


@triton.jit
def _pairs_of_earlier_blocks(
    q, k, b, total, key, decay, pairs, system, place, first, count, head, block_number, k_row, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Write the pairs of a block's rows with all earlier ones; return the decay from the chunk's beginning to it."""
    dtype = key.dtype.element_ty
    q_from, k_from = (q * tl.exp(total)).to(dtype), (k * tl.exp(total)).to(dtype)
    away = tl.zeros([1, WIDTH], tl.float32)  # decay from the end of block j to this one
    for back in range(block_number):
        j = block_number - 1 - back
        t, left = first + j * BLOCK, count - j * BLOCK
        total, last = channel_decays(decay, t * HEADS + head, left, DIM, HEADS, DIM, WIDTH, BLOCK)
        other = load_tile(key + t * k_row, k_row, left, DIM, BLOCK, WIDTH)
        other = tl.trans((other * tl.exp(away + (last - total))).to(dtype))
        of_query = scale * tl.dot(q_from, other, input_precision="ieee")
        store_tile(pairs + place + j * BLOCK, CHUNK, BLOCK, BLOCK, of_query, BLOCK, BLOCK)
        if DELTA:
            of_key = b * tl.dot(k_from, other, input_precision="ieee")
            store_tile(system + place + j * BLOCK, CHUNK, BLOCK, BLOCK, of_key, BLOCK, BLOCK)
        away += last
    return away


@triton.jit
def channel_pairs_kernel(
    query,  # [T, G, DIM]
    key,  # [T, G, DIM]
    decay,  # [T, HEADS, DIM] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    pairs,  # [C, HEADS, CHUNK, CHUNK]
    system,  # [C, HEADS, CHUNK, CHUNK] fp32, its lower blocks are written, with DELTA only
    query_from,  # [T, HEADS, DIM]: scale e^G q
    key_from,  # [T, HEADS, DIM]: e^G k
    key_to,  # [T, HEADS, DIM]: e^Z k
    chunk_row,  # [C] int32
    chunk_rows,  # [C] int32
    q_row, q_head, k_row, k_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """Compute what `triton_chunks.pairs_kernel` does, with a gate for each channel."""
    chunk, head, block_number = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = (chunk * HEADS + head) * (CHUNK * CHUNK) + block_number * BLOCK * CHUNK
    first, count = tl.load(chunk_row + chunk).to(tl.int64), tl.load(chunk_rows + chunk)
    query += head // GROUP * q_head
    key += head // GROUP * k_head
    dtype = key.dtype.element_ty
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    t, left = first + block_number * BLOCK, count - block_number * BLOCK
    q = load_tile(query + t * q_row, q_row, left, DIM, BLOCK, WIDTH)
    k = load_tile(key + t * k_row, k_row, left, DIM, BLOCK, WIDTH)
    total, _ = channel_decays(decay, t * HEADS + head, left, DIM, HEADS, DIM, WIDTH, BLOCK)
    b = load_rows(beta + t * HEADS + head, HEADS, left, BLOCK)[:, None] if DELTA else 0.0

    of_query, of_key = _pairs_within_block(q, k, total, DELTA)
    store_tile(pairs + place + block_number * BLOCK, CHUNK, BLOCK, BLOCK, scale * of_query, BLOCK, BLOCK)
    if DELTA:
        of_key = tl.where(column < row, of_key * b, 0.0)
        store_tile(system + place + block_number * BLOCK, CHUNK, BLOCK, BLOCK, of_key, BLOCK, BLOCK)

    away = _pairs_of_earlier_blocks(
        q, k, b, total, key, decay, pairs, system, place, first, count, head, block_number, k_row, scale,
        HEADS, DIM, WIDTH, CHUNK, DELTA,
    )  # fmt: skip
    t, left = first + block_number * BLOCK, count - block_number * BLOCK
    at = (t * HEADS + head) * DIM
    total, last = channel_decays(decay, t * HEADS + head, left, DIM, HEADS, DIM, WIDTH, BLOCK)
    store_tile(query_from + at, HEADS * DIM, left, DIM, q * (scale * tl.exp(away + total)), BLOCK, WIDTH)
    store_tile(key_from + at, HEADS * DIM, left, DIM, k * tl.exp(away + total), BLOCK, WIDTH)
    away = last - total
    for j in range(block_number + 1, CHUNK // BLOCK):
        at_j = (first + j * BLOCK) * HEADS + head
        away += tl.sum(load_tile(decay + at_j * DIM, HEADS * DIM, count - j * BLOCK, DIM, BLOCK, WIDTH), 0)[None, :]
    store_tile(key_to + at, HEADS * DIM, left, DIM, k * tl.exp(away), BLOCK, WIDTH)
    for j in range(block_number + 1, CHUNK // BLOCK):
        store_tile(pairs + place + j * BLOCK, CHUNK, BLOCK, BLOCK, tl.zeros([BLOCK, BLOCK], dtype), BLOCK, BLOCK)


@triton.jit
def weights_kernel(
    grad_out,  # [T, HEADS, VALUES]
    new,  # [T, HEADS, VALUES]
    grad_x,  # [T, HEADS, VALUES], read with DELTA only
    written,  # [C, HEADS, CHUNK, CHUNK] fp32: scale dout new^T, 0 above the diagonal
    removed,  # [C, HEADS, CHUNK, CHUNK] fp32: dx new^T, 0 on the diagonal too; with DELTA only
    chunk_row,  # [C] int32
    chunk_rows,  # [C] int32
    scale,
    HEADS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(chunk_row + chunk).to(tl.int64), tl.load(chunk_rows + chunk)
    at, place = (first * HEADS + head) * VALUES, (chunk * HEADS + head) * (CHUNK * CHUNK)
    of_query = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_key = tl.zeros([CHUNK, CHUNK], tl.float32)
    for v in range(0, VALUES, BLOCK):
        n = tl.trans(load_tile(new + at + v, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK))
        do = load_tile(grad_out + at + v, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK)
        of_query = tl.dot(do, n, of_query, input_precision="ieee")
        if DELTA:
            dx = load_tile(grad_x + at + v, HEADS * VALUES, count, VALUES - v, CHUNK, BLOCK)
            of_key = tl.dot(dx, n, of_key, input_precision="ieee")
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    of_query = tl.where(column <= row, of_query * scale, 0.0)
    store_tile(written + place, CHUNK, CHUNK, CHUNK, of_query, CHUNK, CHUNK)
    if DELTA:
        store_tile(removed + place, CHUNK, CHUNK, CHUNK, tl.where(column < row, of_key, 0.0), CHUNK, CHUNK)


@triton.jit
def _sums_of_later_blocks(
    dcol, query, key, decay, beta, written, removed, place, first, count, head, block_number, q_row, k_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Add the sums over the rows of later blocks to col, as they decay to the end of this block."""
    dtype = key.dtype.element_ty
    away = tl.zeros([1, WIDTH], tl.float32)  # decay from the end of this block to the beginning of block j
    for j in range(block_number + 1, CHUNK // BLOCK):
        t, left = first + j * BLOCK, count - j * BLOCK
        here, end = channel_decays(decay, t * HEADS + head, left, DIM, HEADS, DIM, WIDTH, BLOCK)
        here = tl.exp(away + here)
        q = load_tile(query + t * q_row, q_row, left, DIM, BLOCK, WIDTH)
        block = place + j * BLOCK * CHUNK + block_number * BLOCK
        of_query = load_tile(written + block, CHUNK, BLOCK, BLOCK, BLOCK, BLOCK)
        dcol = tl.dot(tl.trans(of_query.to(dtype)), (q * here).to(dtype), dcol, input_precision="ieee")
        if DELTA:
            b = load_rows(beta + t * HEADS + head, HEADS, left, BLOCK)[:, None]
            k = load_tile(key + t * k_row, k_row, left, DIM, BLOCK, WIDTH)
            of_key = -b * load_tile(removed + block, CHUNK, BLOCK, BLOCK, BLOCK, BLOCK)
            dcol = tl.dot(tl.trans(of_key.to(dtype)), (k * here).to(dtype), dcol, input_precision="ieee")
        away += end
    return dcol


@triton.jit
def _sums_within_block(
    dq, drow, dcol, q, k, total, row, beta, written, removed, at, place, block_number, left,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Add the sums over the rows of one block, row by row."""
    lines = tl.arange(0, BLOCK)
    block = place + block_number * BLOCK * (CHUNK + 1)
    for j in range(BLOCK):
        at_j = _row(total, j)
        later = tl.exp(tl.where(row >= j, total - at_j, -float("inf")))
        seen = _row(k, j) * later
        dq += tl.load(written + block + j + lines * CHUNK)[:, None] * seen
        earlier = tl.exp(tl.where(row <= j, at_j - total, -float("inf")))
        dcol += tl.load(written + block + j * CHUNK + lines)[:, None] * _row(q, j) * earlier
        if DELTA:
            drow += tl.load(removed + block + j + lines * CHUNK)[:, None] * seen
            b = tl.load(beta + at + j * HEADS, mask=j < left, other=0.0)
            dcol -= tl.load(removed + block + j * CHUNK + lines)[:, None] * (b * _row(k, j)) * earlier
    return dq, drow, dcol


@triton.jit
def channel_sums_kernel(
    query, key,  # [T, G, DIM]
    decay,  # [T, HEADS, DIM] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    written, removed,  # [C, HEADS, CHUNK, CHUNK] fp32, of `weights_kernel`; the second with DELTA only
    grad_query, grad_key,  # [T, HEADS, DIM] fp32
    grad_removed,  # [T, HEADS, DIM] fp32, written with DELTA only
    chunk_row, chunk_rows,  # [C] int32
    q_row, q_head, k_row, k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """Write the sums over the chunk's rows in dq, col and row of `triton_gradients`."""
    chunk, head, block_number = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = (chunk * HEADS + head) * (CHUNK * CHUNK)
    first, count = tl.load(chunk_row + chunk).to(tl.int64), tl.load(chunk_rows + chunk)
    query += head // GROUP * q_head
    key += head // GROUP * k_head
    dtype = key.dtype.element_ty
    row = tl.arange(0, BLOCK)[:, None]
    t, left = first + block_number * BLOCK, count - block_number * BLOCK
    at = t * HEADS + head
    total, last = channel_decays(decay, at, left, DIM, HEADS, DIM, WIDTH, BLOCK)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    drow = tl.zeros([BLOCK, WIDTH], tl.float32)
    dcol = tl.zeros([BLOCK, WIDTH], tl.float32)

    away = tl.zeros([1, WIDTH], tl.float32)  # decay from the end of block j to this one
    for back in range(block_number):
        j = block_number - 1 - back
        t, left = first + j * BLOCK, count - j * BLOCK
        here, end = channel_decays(decay, t * HEADS + head, left, DIM, HEADS, DIM, WIDTH, BLOCK)
        k = load_tile(key + t * k_row, k_row, left, DIM, BLOCK, WIDTH)
        k = (k * tl.exp(away + (end - here))).to(dtype)
        block = place + block_number * BLOCK * CHUNK + j * BLOCK
        of_query = load_tile(written + block, CHUNK, BLOCK, BLOCK, BLOCK, BLOCK).to(dtype)
        dq = tl.dot(of_query, k, dq, input_precision="ieee")
        if DELTA:
            of_key = load_tile(removed + block, CHUNK, BLOCK, BLOCK, BLOCK, BLOCK).to(dtype)
            drow = tl.dot(of_key, k, drow, input_precision="ieee")
        away += end
    from_edge = tl.exp(total)
    dq *= from_edge
    drow *= from_edge

    dcol = _sums_of_later_blocks(
        dcol, query, key, decay, beta, written, removed, place, first, count, head, block_number, q_row, k_row,
        HEADS, DIM, WIDTH, CHUNK, DELTA,
    )  # fmt: skip
    dcol *= tl.exp(last - total)

    t, left = first + block_number * BLOCK, count - block_number * BLOCK
    q = load_tile(query + t * q_row, q_row, left, DIM, BLOCK, WIDTH).to(tl.float32)
    k = load_tile(key + t * k_row, k_row, left, DIM, BLOCK, WIDTH).to(tl.float32)
    dq, drow, dcol = _sums_within_block(
        dq, drow, dcol, q, k, total, row, beta, written, removed, at, place, block_number, left, HEADS, CHUNK, DELTA
    )
    store_tile(grad_query + at * DIM, HEADS * DIM, left, DIM, dq, BLOCK, WIDTH)
    store_tile(grad_key + at * DIM, HEADS * DIM, left, DIM, dcol, BLOCK, WIDTH)
    if DELTA:
        store_tile(grad_removed + at * DIM, HEADS * DIM, left, DIM, -drow, BLOCK, WIDTH)
