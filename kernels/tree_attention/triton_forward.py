"""Forward over blocks of rows: S = q k^T, online softmax in the log2 domain, out = P v, lse.

Reads q once, and the blocks of k and v that a row of the block sees; writes out and lse. First comes the list of blocks
that all rows see wholly, without a mask, then the list of the partly visible ones. The scale is applied within the
exponent, 2^(scale S - top), as one multiply-add an element (`triton_tiles.factor_of` for the largest scores).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import EXACT, LN2, LOG2E, factor_of, hide, load_tile, power_of_two, store_tile, tanh


@triton.jit
def _forward_blocks(
    acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, count, tokens,
    scale, window, softcap,
    STEP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add ``count`` key blocks of a list; STEP -1: the partly visible ones, which are listed from the back."""
    WHOLE: tl.constexpr = STEP == 1
    block = tl.load(listed)
    for i in range(count):
        following = tl.load(listed + STEP * (i + 1))  # one round ahead of the copies that wait for it
        first = block * KEYS
        key = load_tile(k, first, k_stride, tokens, KEYS, DIM, WIDTH, WHOLE)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if HAS_SOFTCAP:
            scores = tanh(scores * (scale / softcap))
        if not WHOLE:
            keys = first + tl.arange(0, KEYS)
            end = tl.load(ends + keys)
            key_position = tl.load(positions + keys) if HAS_WINDOW else keys
            scores = hide(
                scores, rows[:, None], keys[None, :], end[None, :], row_position[:, None], key_position[None, :],
                window, HAS_WINDOW,
            )  # fmt: skip
        factor = (softcap if HAS_SOFTCAP else scale) * LOG2E
        largest = tl.max(scores, 1)
        new_top = tl.maximum(top, largest * factor_of(largest, factor))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing visible yet: 2^(-inf - 0) = 0
        own_factor = tl.where(tl.abs(new_top) > EXACT, power_of_two(factor), factor)
        probability = tl.exp2(scores * own_factor[:, None] - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(probability, 1)
        value = load_tile(v, first, v_stride, tokens, KEYS, DIM, WIDTH, WHOLE)
        acc = tl.dot(probability.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        top = new_top
        block = following
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "offset", "window", "width"])
def forward_kernel(
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [Hq, T] fp32
    blocks,  # [row blocks, width] int32, `VisibleBlocks`
    full_counts,  # [row blocks] int32
    partial_counts,  # [row blocks] int32
    order,  # [row blocks] int32
    ends,  # [N, filled up] int32
    positions,  # [N, filled up] int32, read with a window only
    row_positions,  # [T, filled up] int32, likewise
    tokens, offset, width, q_stride, q_head, k_stride, k_head, v_stride, v_head, scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    block = tl.load(order + tl.program_id(1))
    row_count = tokens - offset
    first = block * ROWS
    lines = first + tl.arange(0, ROWS)
    rows = offset + lines  # numbered like keys
    query = load_tile(q + head * q_head, first, q_stride, row_count, ROWS, DIM, WIDTH, False)
    row_position = tl.load(row_positions + lines) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    listed = blocks + block.to(tl.int64) * width
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, top, total = _forward_blocks(
        acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position,
        listed, tl.load(full_counts + block), tokens, scale, window, softcap,
        1, DIM, WIDTH, KEYS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    acc, top, total = _forward_blocks(
        acc, top, total, query, k, v, k_stride, v_stride, ends, positions, rows, row_position,
        listed + width - 1, tl.load(partial_counts + block), tokens, scale, window, softcap,
        -1, DIM, WIDTH, KEYS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    saw = total != 0.0
    acc = acc / tl.where(saw, total, 1.0)[:, None]
    store_tile(out + head * DIM, first, HEADS * DIM, row_count, acc, ROWS, DIM, WIDTH)
    factor = (softcap if HAS_SOFTCAP else scale) * LOG2E
    top = tl.where(tl.abs(top) > EXACT, top / power_of_two(factor) * factor, top)
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + head * row_count + lines, log_sum, mask=lines < row_count)
