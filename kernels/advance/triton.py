"""Triton backend: one program, because a step has a few thousand numbers at most.

Bound by the latency of dependent loads: the number of the step and the slots that it names, the places that grow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .reference import Turns

BLOCK = 1024


@triton.jit(do_not_specialize=["N", "M"])
def advance_kernel(
    vector,  # [L] int32
    rising,  # [M] int32
    turn,  # [1] int32
    input_ids,  # [N] int32
    slots,  # [N] int32
    next_slots,  # [W, N] int32
    step,  # [N] int64
    numbers,  # [W, 4, N] fp32
    token,  # [N] int64
    logprob,  # [N] fp32
    raw_logprob,  # [N] fp32
    entropy,  # [N] fp32
    N,
    M,
    BLOCK: tl.constexpr,
):
    now = tl.load(turn)
    to = numbers + now.to(tl.int64) * 4 * N
    for begin in range(0, N, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        live = row < N
        drawn = tl.load(token + row, mask=live, other=0).to(tl.int32)
        tl.store(to + row, drawn.to(tl.float32, bitcast=True), mask=live)
        tl.store(to + N + row, tl.load(logprob + row, mask=live), mask=live)
        tl.store(to + 2 * N + row, tl.load(raw_logprob + row, mask=live), mask=live)
        tl.store(to + 3 * N + row, tl.load(entropy + row, mask=live), mask=live)
        tl.store(input_ids + row, tl.maximum(drawn, 0), mask=live)
        tl.store(slots + row, tl.load(next_slots + now * N + row, mask=live), mask=live)
        tl.store(step + row, tl.load(step + row, mask=live) + 1, mask=live)
    for begin in range(0, M, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        place = tl.load(rising + entry, mask=entry < M, other=0)
        grown = tl.load(vector + place, mask=entry < M) + 1
        tl.store(vector + place, grown, mask=entry < M)
    tl.debug_barrier()  # every warp has read the number of the step
    tl.store(turn, now + 1)


def advance(turns: Turns, token: Tensor, logprob: Tensor, raw_logprob: Tensor, entropy: Tensor) -> None:
    advance_kernel[(1,)](
        *turns,
        token,
        logprob,
        raw_logprob,
        entropy,
        len(token),
        len(turns.rising),
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
