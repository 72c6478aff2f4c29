"""Kernels of the pass over states: forward through the segments of a run, and back.

One program a run (a root and all below it), head and block of values; the state [Dk, BLOCK] stays in registers from
chunk to chunk, in fp32. With S the state at a chunk's beginning, ``G`` decays from there to a row, ``Z`` from a row to
the chunk's end, ``G_n`` of the whole chunk,

    x   = beta (v - e^G k S)            new = inverse x            (without the delta rule new = v)
    out = scale e^G q S + pairs new     S' = e^(G_n) S + k^T e^Z new

and backward, with dS' the gradient of the state at its end,

    dnew = pairs^T dout + e^Z k dS'     dx = inverse^T dnew        dv = beta dx        (without: dv = dnew)
    dS   = e^(G_n) dS' + scale q^T e^G dout - k^T e^G dv

At a segment's beginning a program loads the state of its source, which it has written itself, and at its end stores
its own if other segments or the caller need it. Backward it walks the same segments from last to first, and adds the
gradient of a segment's first state to that of its source: a fixed order, without atomics.

With one decay a head, products are of rows as they are, and their results are scaled. With one a channel
``e^G q``, ``e^G k`` and ``e^Z k`` are read (`triton_channels`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import decays, load_rows, load_tile, store_tile, whole_decay


@triton.jit
def _first_state(
    states, initial, of, head, begin, columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """Load the state ``of`` a segment's source: a slot, or -2 - j for the j-th of ``initial``; zeros for -1."""
    state = load_tile(
        states + (of * HEADS + head) * (DIM * VALUES) + begin, VALUES, tl.where(of >= 0, DIM, 0), columns, WIDTH,
        BLOCK,
    )  # fmt: skip
    if GIVEN:
        state += load_tile(
            initial + ((-2 - of) * HEADS + head) * (DIM * VALUES) + begin, VALUES, tl.where(of < -1, DIM, 0),
            columns, WIDTH, BLOCK,
        )  # fmt: skip
    return state


@triton.jit
def state_scan_kernel(
    query,  # [T, G, DIM], read with OUT only; with CHANNELS scale e^G q [T, HEADS, DIM]
    key,  # [T, G, DIM]; with CHANNELS e^G k [T, HEADS, DIM]
    key_to,  # [T, HEADS, DIM]: e^Z k, read with CHANNELS only
    value,  # [T, HEADS, VALUES]
    decay,  # [T, HEADS] or [T, HEADS, DIM] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    pairs,  # [C, HEADS, CHUNK, CHUNK], read with OUT only
    inverse,  # [C, HEADS, CHUNK, CHUNK], read with DELTA only
    initial,  # [J, HEADS, DIM, VALUES] fp32, read with GIVEN only
    states,  # [slots, HEADS, DIM, VALUES] fp32
    out,  # [T, HEADS, VALUES], written with OUT only
    new,  # [T, HEADS, VALUES], written without OUT only
    starts,  # [C, HEADS, DIM, VALUES], likewise
    row, rows, chunk, source, slot, run_begin, run_end,  # `SegmentLists`
    q_row, q_head, k_row, k_head, v_row, v_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, GIVEN: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    begin, head = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    columns = VALUES - begin
    query += head // GROUP * q_head
    key += head // GROUP * k_head
    value += head * v_head + begin
    dtype = key.dtype.element_ty
    for s in range(tl.load(run_begin + tl.program_id(2)), tl.load(run_end + tl.program_id(2))):
        of = tl.load(source + s).to(tl.int64)
        state = _first_state(states, initial, of, head, begin, columns, HEADS, DIM, WIDTH, VALUES, BLOCK, GIVEN)
        first, length, number = tl.load(row + s).to(tl.int64), tl.load(rows + s), tl.load(chunk + s).to(tl.int64)
        for i in range(tl.cdiv(length, CHUNK)):
            t = first + i * CHUNK
            count = tl.minimum(length - i * CHUNK, CHUNK)
            at, place = t * HEADS + head, (number + i) * HEADS + head
            k = load_tile(key + t * k_row, k_row, count, DIM, CHUNK, WIDTH)
            v = load_tile(value + t * v_row, v_row, count, columns, CHUNK, BLOCK)
            if CHANNELS:
                from_start = 1.0
            else:
                total, last = decays(decay, at, count, HEADS, CHUNK)
                from_start = tl.exp(total)
            rounded = state.to(dtype)
            if DELTA:
                seen = tl.dot(k, rounded, input_precision="ieee") * from_start
                x = load_rows(beta + at, HEADS, count, CHUNK)[:, None] * (v - seen)
                solve = load_tile(inverse + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
                v = tl.dot(solve, x.to(dtype), input_precision="ieee").to(dtype)
            if OUT:
                q = load_tile(query + t * q_row, q_row, count, DIM, CHUNK, WIDTH)
                o = tl.dot(q, rounded, input_precision="ieee") * from_start
                if not CHANNELS:
                    o *= scale
                pair = load_tile(pairs + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
                o = tl.dot(pair, v, o, input_precision="ieee")
                store_tile(out + at * VALUES + begin, HEADS * VALUES, count, columns, o, CHUNK, BLOCK)
            else:
                store_tile(starts + place * (DIM * VALUES) + begin, VALUES, DIM, columns, state, WIDTH, BLOCK)
                store_tile(new + at * VALUES + begin, HEADS * VALUES, count, columns, v, CHUNK, BLOCK)
            if CHANNELS:
                k = load_tile(key_to + at * DIM, HEADS * DIM, count, DIM, CHUNK, WIDTH)
                state *= whole_decay(decay, at, count, HEADS, DIM, WIDTH, CHUNK)
            else:
                v = (v * tl.exp(last - total)).to(dtype)
                state *= tl.exp(last)
            state = tl.dot(tl.trans(k), v, state, input_precision="ieee")
        left = tl.load(slot + s).to(tl.int64)
        store_tile(
            states + (left * HEADS + head) * (DIM * VALUES) + begin, VALUES, tl.where(left >= 0, DIM, 0), columns,
            state, WIDTH, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # other threads read the state


@triton.jit
def state_scan_back_kernel(
    grad_out,  # [T, HEADS, VALUES]
    query,  # [T, G, DIM]; with CHANNELS scale e^G q [T, HEADS, DIM]
    key,  # [T, G, DIM]; with CHANNELS e^G k [T, HEADS, DIM]
    key_to,  # [T, HEADS, DIM]: e^Z k, read with CHANNELS only
    decay,  # [T, HEADS] or [T, HEADS, DIM] fp32
    beta,  # [T, HEADS] fp32, read with DELTA only
    pairs,  # [C, HEADS, CHUNK, CHUNK]
    inverse,  # [C, HEADS, CHUNK, CHUNK], read with DELTA only
    grad_states,  # [slots, HEADS, DIM, VALUES] fp32, the callers' gradients when it begins
    grad_initial,  # [J, HEADS, DIM, VALUES] fp32, written with GIVEN only
    grad_ends,  # [C, HEADS, DIM, VALUES], of the states at the chunks' ends
    grad_x,  # [T, HEADS, VALUES], written with DELTA only
    grad_value,  # [T, HEADS, VALUES]
    row, rows, chunk, source, slot, run_begin, run_end,  # `SegmentLists`
    q_row, q_head, k_row, k_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, DELTA: tl.constexpr, CHANNELS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    begin, head = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    columns = VALUES - begin
    query += head // GROUP * q_head
    key += head // GROUP * k_head
    dtype = key.dtype.element_ty
    first_segment, last_segment = tl.load(run_begin + tl.program_id(2)), tl.load(run_end + tl.program_id(2)) - 1
    for back in range(last_segment - first_segment + 1):
        s = last_segment - back
        left = tl.load(slot + s).to(tl.int64)
        grad = load_tile(
            grad_states + (left * HEADS + head) * (DIM * VALUES) + begin, VALUES, tl.where(left >= 0, DIM, 0), columns,
            WIDTH, BLOCK,
        )  # fmt: skip
        first, length, number = tl.load(row + s).to(tl.int64), tl.load(rows + s), tl.load(chunk + s).to(tl.int64)
        chunks = tl.cdiv(length, CHUNK)
        for reverse in range(chunks):
            i = chunks - 1 - reverse
            t = first + i * CHUNK
            count = tl.minimum(length - i * CHUNK, CHUNK)
            at, place = t * HEADS + head, (number + i) * HEADS + head
            store_tile(grad_ends + place * (DIM * VALUES) + begin, VALUES, DIM, columns, grad, WIDTH, BLOCK)
            q = load_tile(query + t * q_row, q_row, count, DIM, CHUNK, WIDTH)
            k = load_tile(key + t * k_row, k_row, count, DIM, CHUNK, WIDTH)
            do = load_tile(grad_out + at * VALUES + begin, HEADS * VALUES, count, columns, CHUNK, BLOCK)
            pair = load_tile(pairs + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
            if CHANNELS:
                from_start = 1.0
                to = load_tile(key_to + at * DIM, HEADS * DIM, count, DIM, CHUNK, WIDTH)
                dv = tl.dot(to, grad.to(dtype), input_precision="ieee")
                grad *= whole_decay(decay, at, count, HEADS, DIM, WIDTH, CHUNK)
            else:
                total, last = decays(decay, at, count, HEADS, CHUNK)
                from_start = tl.exp(total)
                dv = tl.dot(k, grad.to(dtype), input_precision="ieee") * tl.exp(last - total)
                grad *= tl.exp(last)
            dv = tl.dot(tl.trans(pair), do, dv, input_precision="ieee")
            if not CHANNELS:
                do = (do * (from_start * scale)).to(dtype)
            grad = tl.dot(tl.trans(q), do, grad, input_precision="ieee")
            if DELTA:
                solve = load_tile(inverse + place * (CHUNK * CHUNK), CHUNK, CHUNK, CHUNK, CHUNK, CHUNK)
                dx = tl.dot(tl.trans(solve), dv.to(dtype), input_precision="ieee")
                store_tile(grad_x + at * VALUES + begin, HEADS * VALUES, count, columns, dx, CHUNK, BLOCK)
                dv = dx * load_rows(beta + at, HEADS, count, CHUNK)[:, None]
                grad = tl.dot(tl.trans(k), (-dv * from_start).to(dtype), grad, input_precision="ieee")
            store_tile(grad_value + at * VALUES + begin, HEADS * VALUES, count, columns, dv, CHUNK, BLOCK)
        of = tl.load(source + s).to(tl.int64)
        inherited = grad_states + (of * HEADS + head) * (DIM * VALUES) + begin
        here = tl.where(of >= 0, DIM, 0)
        added = load_tile(inherited, VALUES, here, columns, WIDTH, BLOCK) + grad
        store_tile(inherited, VALUES, here, columns, added, WIDTH, BLOCK)
        if GIVEN:
            store_tile(
                grad_initial + ((-2 - of) * HEADS + head) * (DIM * VALUES) + begin, VALUES, tl.where(of < -1, DIM, 0),
                columns, grad, WIDTH, BLOCK,
            )  # fmt: skip
        tl.debug_barrier()  # other threads read the sum
