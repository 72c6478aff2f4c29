"""Kernels of the chunks: the products of rows within a chunk, and the inverse that the delta rule needs of them.

One program a chunk and head; nothing depends on the tree. With G the decay from the chunk's beginning to a row,

    pairs_ij  = scale (q_i . k_j) exp(G_i - G_j)      for j <= i, else 0
    system_ij = beta_i (k_i . k_j) exp(G_i - G_j)     for j < i, else 0
    inverse   = (1 + system)^-1                       unit lower triangular

The inverse is made by blocks of 16 rows: those on the diagonal row by row, all at once, and then each block below,
``-X_ii sum_m system_im X_mj``, in the order of their distance from the diagonal. Only sums of products are formed that
substitution forms too, so equal keys, whose powers of ``system`` grow like binomials, cost no digits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import load_rows, load_tile, store_tile

BLOCK = tl.constexpr(16)  # rows of a block of the inverse


@triton.jit
def pairs_kernel(
    query,  # [T, G, DIM]
    key,  # [T, G, DIM]
    decay,  # [T, HEADS] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    pairs,  # [C, HEADS, CHUNK, CHUNK]
    system,  # [C, HEADS, CHUNK, CHUNK] fp32, written with DELTA only
    chunk_row,  # [C] int32
    chunk_rows,  # [C] int32
    q_row, q_head, k_row, k_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(chunk_row + chunk).to(tl.int64), tl.load(chunk_rows + chunk)
    query += first * q_row + head // GROUP * q_head
    key += first * k_row + head // GROUP * k_head
    at = first * HEADS + head
    of_query = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_key = tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in tl.static_range(0, DIM, PART):
        k = load_tile(key + begin, k_row, count, DIM - begin, CHUNK, PART)
        q = load_tile(query + begin, q_row, count, DIM - begin, CHUNK, PART)
        of_query = tl.dot(q, tl.trans(k), of_query, input_precision="ieee")
        if DELTA:
            of_key = tl.dot(k, tl.trans(k), of_key, input_precision="ieee")
    total = tl.cumsum(load_rows(decay + at, HEADS, count, CHUNK), 0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # the future is masked before exp, where it would overflow
    decayed = tl.exp(tl.where(column <= row, total[:, None] - total[None, :], -float("inf")))
    place = (chunk * HEADS + head) * (CHUNK * CHUNK)
    store_tile(pairs + place, CHUNK, CHUNK, CHUNK, scale * of_query * decayed, CHUNK, CHUNK)
    if DELTA:
        of_key *= decayed * load_rows(beta + at, HEADS, count, CHUNK)[:, None]
        store_tile(system + place, CHUNK, CHUNK, CHUNK, tl.where(column < row, of_key, 0.0), CHUNK, CHUNK)


@triton.jit
def inverse_kernel(
    system,  # [C, HEADS, CHUNK, CHUNK] fp32, strictly lower triangular; its other blocks are overwritten
    inverse,  # [C, HEADS, CHUNK, CHUNK]
    HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of the inverse is kept in fp32 in block (j, i) of the system, which has no use for it."""
    place = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * (CHUNK * CHUNK)
    system += place
    inverse += place
    dtype = inverse.dtype.element_ty
    block = tl.arange(0, CHUNK // BLOCK)[:, None, None]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    on_diagonal = block * BLOCK * (CHUNK + 1) + row * CHUNK + column
    lower = tl.load(system + on_diagonal)
    inverted = tl.where(row == column, 1.0, tl.zeros([CHUNK // BLOCK, BLOCK, BLOCK], tl.float32))
    for i in range(1, BLOCK):
        of_row = tl.sum(tl.where(row == i, lower, 0.0), 1)  # [blocks, BLOCK], of the rows above i
        added = tl.sum(of_row[:, :, None] * inverted, 1)
        inverted = tl.where(row == i, inverted - added[:, None, :], inverted)
    tl.store(system + on_diagonal, inverted)
    tl.store(inverse + on_diagonal, inverted.to(dtype))
    line = tl.arange(0, BLOCK)[:, None] * CHUNK + tl.arange(0, BLOCK)[None, :]
    for distance in tl.static_range(1, CHUNK // BLOCK):
        tl.debug_barrier()  # blocks nearer to the diagonal are read
        for i in tl.static_range(distance, CHUNK // BLOCK):
            total = tl.zeros([BLOCK, BLOCK], tl.float32)
            for m in tl.static_range(i - distance, i):
                left = tl.load(system + (i * CHUNK + m) * BLOCK + line)
                above = tl.load(system + ((i - distance) * CHUNK + m) * BLOCK + line)  # block (m, j)
                total = tl.dot(left, above, total, input_precision="ieee")
            diagonal = tl.load(system + i * (CHUNK + 1) * BLOCK + line)
            total = -tl.dot(diagonal, total, input_precision="ieee")
            tl.store(system + ((i - distance) * CHUNK + i) * BLOCK + line, total)
            tl.store(inverse + (i * CHUNK + i - distance) * BLOCK + line, total.to(dtype))
            zero = tl.zeros([BLOCK, BLOCK], dtype)
            tl.store(inverse + ((i - distance) * CHUNK + i) * BLOCK + line, zero)
