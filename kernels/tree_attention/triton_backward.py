"""Backward in two deterministic passes instead of one with atomics, with P = 2^(scale S - lse).

    dQ       over blocks of rows: delta = rowsum(dO * O), dS = P (dO v^T - delta), dQ = scale dS k
    dK/dV    over blocks of keys: dV = P^T dO, dK = scale dS^T q, over all rows and query heads that read them

Registers do not hold dK and dV of 256 columns: two programs then share them, and each computes all scores.

dQ reads q, dO and O once, and the visible blocks of k and v; it stores lse and delta as dK/dV reads them, in whole
tiles of each head. dK/dV reads k and v once, and q and dO for every query head and block of rows that sees the keys. It
is cut into `WorkItems`: an item that is all the work of its key block writes the gradients, the others write partial
sums that `add_kernel` adds up in the order of the rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import LOG2E, hide, load_lines, load_tile, log2_scores, store_tile, wide_product

LARGEST_LSE = tl.constexpr(2.0**24)
"""Rows whose log-sum-exp is larger in the log2 domain have gradients of 0: its rounding is that of their probabilities,
up to a factor of 8 here, and their scores have no bits below one."""


@triton.jit
def _dq_blocks(
    acc, query, grad, lse2, delta, k, v, k_stride, v_stride, ends, positions, rows, row_position, listed, count, tokens,
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
        value = load_tile(v, first, v_stride, tokens, KEYS, DIM, WIDTH, WHOLE)
        scores, slope = log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        if not WHOLE:
            keys = first + tl.arange(0, KEYS)
            end = tl.load(ends + keys)
            key_position = tl.load(positions + keys) if HAS_WINDOW else keys
            scores = hide(
                scores, rows[:, None], keys[None, :], end[None, :], row_position[:, None], key_position[None, :],
                window, HAS_WINDOW,
            )  # fmt: skip
        probability = tl.exp2(scores - lse2[:, None])
        dscores = probability * (tl.dot(grad, value.T, input_precision="ieee") - delta[:, None]) * slope
        acc = tl.dot(dscores.to(key.dtype), key, acc, input_precision="ieee")
        block = following
    return acc


@triton.jit(do_not_specialize=["tokens", "offset", "window", "width"])
def dq_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    out,  # [T, Hq, D]
    lse,  # [Hq, T] fp32
    row_sums,  # [Hq, T filled up / PACK, 2, PACK] fp32, written for dkdv_kernel: lse in the log2 domain and delta
    dq,  # [T, Hq, D]
    blocks,  # [row blocks, width] int32, `VisibleBlocks`
    full_counts,  # [row blocks] int32
    partial_counts,  # [row blocks] int32
    order,  # [row blocks] int32
    ends,  # [N, filled up] int32
    positions,  # [N, filled up] int32, read with a window only
    row_positions,  # [T, filled up] int32, likewise
    tokens, offset, width, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr,
    PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    block = tl.load(order + tl.program_id(1))
    row_count = tokens - offset
    first = block * ROWS
    lines = first + tl.arange(0, ROWS)
    rows = offset + lines  # numbered like keys
    query = load_tile(q + head * q_head, first, q_stride, row_count, ROWS, DIM, WIDTH, False)
    grad = load_tile(grad_out + head * g_head, first, g_stride, row_count, ROWS, DIM, WIDTH, False)
    output = load_tile(out + head * DIM, first, HEADS * DIM, row_count, ROWS, DIM, WIDTH, False)
    delta = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
    lse2 = tl.load(lse + head * row_count + lines, mask=lines < row_count, other=float("inf")) * LOG2E
    lse2 = tl.where(tl.abs(lse2) > LARGEST_LSE, float("inf"), lse2)  # and rows that see nothing
    packed = head * (2 * FILL * tl.cdiv(row_count, FILL)) + lines // PACK * (2 * PACK) + lines % PACK
    tl.store(row_sums + packed, lse2)  # inf past the last row
    tl.store(row_sums + packed + PACK, delta)
    row_position = tl.load(row_positions + lines) if HAS_WINDOW else rows
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    listed = blocks + block.to(tl.int64) * width
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    acc = _dq_blocks(
        acc, query, grad, lse2, delta, k, v, k_stride, v_stride, ends, positions, rows, row_position,
        listed, tl.load(full_counts + block), tokens, scale, window, softcap,
        1, DIM, WIDTH, KEYS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    acc = _dq_blocks(
        acc, query, grad, lse2, delta, k, v, k_stride, v_stride, ends, positions, rows, row_position,
        listed + width - 1, tl.load(partial_counts + block), tokens, scale, window, softcap,
        -1, DIM, WIDTH, KEYS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    store_tile(dq + head * DIM, first, HEADS * DIM, row_count, acc * scale, ROWS, DIM, WIDTH)


@triton.jit
def _by_halves(entry):
    """Load an int32 of a list. As four bytes Triton would copy it to shared memory, and then wait for all copies at
    once; one round ahead in a register, as in the other kernels, it makes dK/dV spill.
    """
    half = entry.to(tl.pointer_type(tl.uint16))
    return tl.load(half).to(tl.int32) | (tl.load(half + 1).to(tl.int32) << 16)


@triton.jit
def _dkdv_tiles(
    dk, dv, key, value, far_key, far_value, near, far, q, grad_out, row_sums,
    q_stride, q_head, g_stride, g_head, row_head, first_head,
    row_positions, keys, end, key_position, listed, begin, stop, row_count, offset, scale, window, softcap,
    STEP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add tiles ``begin`` to ``stop``: the tiles of one row block of the list after the other, for each query head."""
    WHOLE: tl.constexpr = STEP == 1
    LEAN: tl.constexpr = PARTS == 1 and dk.numel * ROWS >= 128 * 128 * 64  # otherwise dK, dV and scores spill
    KEYS: tl.constexpr = dk.shape[0]
    ROOM: tl.constexpr = PARTS == 1
    for i in range(begin, stop):
        entry = listed + STEP * (i // GROUP)
        block = _by_halves(entry) if WHOLE else tl.load(entry)
        head = first_head + i % GROUP
        first = block * ROWS
        query = load_tile(
            q + near + wide_product(head, q_head), first, q_stride, row_count, ROWS, DIM, WIDTH, WHOLE, LEAN
        )
        grad = load_tile(
            grad_out + near + wide_product(head, g_head), first, g_stride, row_count, ROWS, DIM, WIDTH, WHOLE, LEAN
        )
        product = tl.dot(key, query.T, input_precision="ieee")
        if PARTS == 2:
            far_query = load_tile(
                q + far + wide_product(head, q_head), first, q_stride, row_count, ROWS, DIM, WIDTH, WHOLE
            )
            product = tl.dot(far_key, far_query.T, product, input_precision="ieee")
        scores, slope = log2_scores(product, scale, softcap, HAS_SOFTCAP)
        if not WHOLE:
            row, line = offset + first, tl.arange(0, ROWS)[None, :]
            seen = (keys[:, None] - row <= line) & (line < end[:, None] - row)
            if HAS_WINDOW:
                row_position = load_lines(row_positions + first, KEYS, ROWS, ROOM)
                seen &= row_position - key_position[:, None] < window
            scores = tl.where(seen, scores, -float("inf"))
        sums = row_sums + wide_product(head, 2 * row_head) + 2 * first
        probability = tl.exp2(scores - load_lines(sums, KEYS, ROWS, ROOM))  # [keys, rows]
        dv = tl.dot(probability.to(grad.dtype), grad, dv, input_precision="ieee")
        dprobability = tl.dot(value, grad.T, input_precision="ieee")
        if PARTS == 2:
            far_grad = load_tile(
                grad_out + far + wide_product(head, g_head), first, g_stride, row_count, ROWS, DIM, WIDTH, WHOLE
            )
            dprobability = tl.dot(far_value, far_grad.T, dprobability, input_precision="ieee")
        delta = load_lines(sums + ROWS, KEYS, ROWS, ROOM)  # here, not above: it takes registers until it is used
        dscores = probability * (dprobability - delta) * slope
        dk = tl.dot(dscores.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "offset", "window", "width", "slots"])
def dkdv_kernel(
    grad_out,  # [T, Hq, D]
    q,  # [T, Hq, D]
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, D]
    row_sums,  # [Hq, T filled up / ROWS, 2, ROWS] fp32: lse and delta
    dk_out,  # [N, Hkv, D], D = PARTS DIM
    dv_out,  # [N, Hkv, D]
    sums,  # [Hkv PARTS, slots, 2, KEYS, WIDTH] fp32: dK and dV of items that are only a part of their key block's work
    items,  # [M, 4] int32, `WorkItems`
    blocks,  # [key blocks, width] int32, `VisibleBlocks`
    full_counts,  # [key blocks] int32
    partial_counts,  # [key blocks] int32, not read: the items say where they end
    ends,  # [N, filled up] int32
    positions,  # [N, filled up] int32, read with a window only
    row_positions,  # [T, filled up] int32, likewise
    tokens, offset, width, slots, g_stride, g_head, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    scale, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    kv_head = program // PARTS
    near = 0  # first of the columns of dK and dV
    far = 0  # of the others, that scores need too
    if PARTS == 2:
        near = tl.program_id(0) % 2 * WIDTH
        far = WIDTH - near
    item = items + 4 * tl.program_id(1)
    block = tl.load(item)
    if block < 0:
        return
    begin, stop, slot = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    row_count = tokens - offset
    row_head = tl.cdiv(row_count, FILL) * FILL
    first = block * KEYS
    keys = first + tl.arange(0, KEYS)
    k += kv_head * k_head
    v += kv_head * v_head
    key = load_tile(k + near, first, k_stride, tokens, KEYS, DIM, WIDTH, False)
    value = load_tile(v + near, first, v_stride, tokens, KEYS, DIM, WIDTH, False)
    far_key, far_value = key, value
    if PARTS == 2:
        far_key = load_tile(k + far, first, k_stride, tokens, KEYS, DIM, WIDTH, False)
        far_value = load_tile(v + far, first, v_stride, tokens, KEYS, DIM, WIDTH, False)
    end = tl.load(ends + keys)
    key_position = tl.load(positions + keys) if HAS_WINDOW else keys
    first_head = tl.program_id(0) // PARTS * GROUP
    listed = blocks + block.to(tl.int64) * width
    full = GROUP * tl.load(full_counts + block)  # the tiles before this one are wholly visible
    dk = tl.zeros([KEYS, WIDTH], tl.float32)
    dv = tl.zeros([KEYS, WIDTH], tl.float32)
    dk, dv = _dkdv_tiles(
        dk, dv, key, value, far_key, far_value, near, far, q, grad_out, row_sums,
        q_stride, q_head, g_stride, g_head, row_head, first_head,
        row_positions, keys, end, key_position, listed,
        tl.minimum(begin, full), tl.minimum(stop, full),
        row_count, offset, scale, window, softcap, 1, GROUP, DIM, WIDTH, ROWS, PARTS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    dk, dv = _dkdv_tiles(
        dk, dv, key, value, far_key, far_value, near, far, q, grad_out, row_sums,
        q_stride, q_head, g_stride, g_head, row_head, first_head,
        row_positions, keys, end, key_position, listed + width - 1,
        tl.maximum(begin, full) - full, tl.maximum(stop, full) - full,
        row_count, offset, scale, window, softcap, -1, GROUP, DIM, WIDTH, ROWS, PARTS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    if slot < 0:
        stride = HEADS // GROUP * PARTS * DIM
        store_tile(dk_out + program * DIM, first, stride, tokens, dk * scale, KEYS, DIM, WIDTH)
        store_tile(dv_out + program * DIM, first, stride, tokens, dv, KEYS, DIM, WIDTH)
    else:
        sums += (program * slots + slot) * (2 * KEYS * WIDTH)
        store_tile(sums, slot * 0, WIDTH, KEYS, dk * scale, KEYS, WIDTH, WIDTH)
        store_tile(sums, slot * 0 + KEYS, WIDTH, 2 * KEYS, dv, KEYS, WIDTH, WIDTH)


@triton.jit(do_not_specialize=["tokens", "slots"])
def add_kernel(
    sums,  # [Hkv PARTS, slots, 2, KEYS, WIDTH] fp32
    splits,  # [S, 3] int32, `WorkItems`
    dk_out,  # [N, Hkv, D]
    dv_out,  # [N, Hkv, D]
    tokens, slots, stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of LINES keys of a key block that was cut into items."""
    program = tl.program_id(0).to(tl.int64)
    split = splits + 3 * tl.program_id(1)
    block = tl.load(split)
    if block < 0:
        return
    line = tl.program_id(2) * LINES
    sums += (program * slots + tl.load(split + 1)) * (2 * KEYS * WIDTH)
    dk = tl.zeros([LINES, WIDTH], tl.float32)
    dv = tl.zeros([LINES, WIDTH], tl.float32)
    for _ in range(tl.load(split + 2)):
        dk += load_tile(sums, line, WIDTH, KEYS, LINES, WIDTH, WIDTH, True)
        dv += load_tile(sums, KEYS + line, WIDTH, 2 * KEYS, LINES, WIDTH, WIDTH, True)
        sums += 2 * KEYS * WIDTH
    first = block * KEYS + line
    store_tile(dk_out + program * DIM, first, stride, tokens, dk, LINES, DIM, WIDTH)
    store_tile(dv_out + program * DIM, first, stride, tokens, dv, LINES, DIM, WIDTH)
