"""Triton backend of :func:`sample_tokens`: a row is cut into blocks of tokens, one program each; no sort.

    scan    a block: largest logit, sums of w and w log2 w; the race of its tokens, or the peaks of its strips
    select  a row with filters: its candidates, the last token that is kept, and the draw (:mod:`.filters`)
    bracket, gather, settle    a row whose candidates do not hold that token; and race, over the tokens that are kept
            (:mod:`.strip_select`)
    finish  a row: combines its blocks

The logits are read once, 4 bytes a token of fp32 and 2 of bf16, 16 bytes a thread at a time. A block writes a few
numbers, in rows with filters one more for every 32 tokens; nothing of size [N, V] is written. Whether a row has a
filter, and whether its candidates are enough, is decided on the device. How a row is cut depends only on its length,
and blocks are combined in their order, so a row's bits do not depend on the batch.

Order of the tokens, masses and noise are those of :mod:`.reference`. No parameter is read on the host: calls can be
captured in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import BY_COUNT, DRAWN, JUDGED, select_kernel
from .noise import arrival, least_bounds, log2_bound, uniforms, words_at, words_of
from .row import (
    INFINITY,
    LN2,
    LOG2E,
    MAX_INDEX,
    NOTHING,
    TINY,
    floor_of,
    is_filtered,
    is_kept,
    is_valid,
    load_block,
    load_blocks,
    log2_weights,
    rescale,
    scale_of,
)
from .strip_select import bracket_kernel, gather_kernel, race_kernel, settle_kernel

BLOCK = 4096  # tokens of a program; part of the summation order, so not tuned by shape
GROUPS = 16  # of a block's tokens, each with a bound of its own
STRIP = 32  # adjacent tokens, of which the largest logit is stored
CHOSEN = 128  # strips of a row that may hold its candidates
# For rows whose candidates are not enough:
SPLITS = 16  # programs that share one
SAMPLE = 4096  # tokens by which the cut is guessed
ROOM = 16384  # tokens among which it is found
ROUND = 2048  # tokens that a program goes through a row by
WHOLE = 8192  # tokens that one of more warps goes through a row by


@triton.jit(do_not_specialize=["vocab"])
def scan_kernel(
    logits,  # [N, V], rows row_stride apart
    temperature, top_k, top_p, min_p, seed, step,  # as in `sample_triton`
    best,  # [N, C] float32, out: the largest logit, +inf where one is NaN or +inf
    mass,  # [N, C] float32, out: sum of w = exp((x - best of the block) / T)
    moment,  # [N, C] float32, out: sum of w log2 w
    raw,  # [N, C] float32, out: the mass at T = 1
    least,  # [N, C] float32, out: the least logit that has a weight beside the block's best; not of filtered rows
    bound,  # [N, C, GROUPS] int32, out: see `least_bounds`; not of greedy or filtered rows
    peaks,  # [N, C, BLOCK / STRIP] float32, out: the largest logit of each strip of a filtered row; None without any
    row_stride, vocab,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    n, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    at = n * tl.num_programs(1) + tl.program_id(1)
    greedy, scale = scale_of(tl.load(temperature + n))
    if peaks is None:
        filtered: tl.constexpr = False
    else:
        filtered = is_filtered(n, top_k, top_p, min_p, vocab)
    x = load_block(logits + n * row_stride, begin, vocab, BLOCK)
    if filtered:
        STRIPS: tl.constexpr = BLOCK // STRIP
        strips = tl.max(tl.reshape(x, (STRIPS, STRIP)), 1)
        tl.store(peaks + at * STRIPS + tl.arange(0, STRIPS), strips)
        top = tl.max(strips, 0)
        low = top
    else:
        top, low = tl.max(x, 0), tl.min(x, 0)
    base = tl.where(top == -INFINITY, 0.0, top)
    z = (x - base) * scale
    if (low - base) * scale < -125.0:  # only then is there a token without a weight
        z = tl.maximum(z, NOTHING, propagate_nan=tl.PropagateNan.ALL)
        if not filtered:
            low = tl.min(tl.where(tl.exp2(z) >= TINY, x, INFINITY), 0)
    w = tl.exp2(z)
    total, sum_wz = tl.sum(w, 0), tl.sum(w * z, 0)  # NaN where a logit is NaN or +inf
    if filtered:  # noqa: SIM102 (it may be decided when compiling)
        if sum_wz != sum_wz:  # or where w is 0 and z is -inf
            sum_wz = tl.sum(w * tl.maximum(z, NOTHING), 0)
    tl.store(best + at, tl.where(total == total, top, INFINITY))
    tl.store(mass + at, total)
    tl.store(moment + at, sum_wz)
    if scale != LOG2E:
        tl.store(raw + at, tl.sum(tl.exp2((x - base) * LOG2E), 0))
    else:
        tl.store(raw + at, total)
    if not filtered:
        tl.store(least + at, low)
        if not greedy:
            WIDTH: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth
            words = words_of(tl.load(seed + n), tl.load(step + n), begin, BLOCK, WIDTH)
            tl.store(bound + at * GROUPS + tl.arange(0, GROUPS), least_bounds(words, w, GROUPS))


@triton.jit
def winner(
    row, n, top, scale, seed, step, raced, floor, cut, cut_index, best, bound, vocab, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the token of the least E / w, the lowest index among equals.

    Groups of tokens are visited in the order of their bounds, until the next bound lies above the best score.
    """
    SPAN: tl.constexpr = BLOCK // 4 // GROUPS  # a group: four spans, a quarter of the block apart
    group = tl.arange(0, BLOCKS * GROUPS)
    inside = group < blocks * GROUPS
    low = log2_bound(tl.load(bound + n * blocks * GROUPS + group, mask=inside, other=0))
    if not raced:  # weights are relative to the block's best
        low -= log2_weights(tl.load(best + n * blocks + group // GROUPS, mask=inside, other=0.0), top, scale)
    low = tl.where(inside, low, INFINITY)
    score = tl.full((), INFINITY, tl.float32)
    first = tl.full((), MAX_INDEX, tl.int32)
    lowest = tl.min(low, 0)
    while (lowest < INFINITY) & (lowest <= tl.log2(score)):
        this = tl.min(tl.where(low == lowest, group, MAX_INDEX), 0)
        begin = this // GROUPS * BLOCK + this % GROUPS * SPAN
        i, c = tl.arange(0, 4 * SPAN), 4 * tl.arange(0, SPAN)
        index = begin + i // SPAN * (BLOCK // 4) + i % SPAN
        x = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        z = log2_weights(x, top, scale)
        words = words_at(seed, step, (begin + c // SPAN * (BLOCK // 4) + c % SPAN) // 4)
        scores = arrival(uniforms(words)) * tl.exp2(-z)
        if raced:
            scores = tl.where(is_kept(x, tl.exp2(z), index, floor, cut, cut_index), scores, INFINITY)
        here = tl.min(scores, 0)
        at = tl.min(tl.where(scores == here, index, MAX_INDEX), 0)
        first = tl.where(here < score, at, tl.where(here == score, tl.minimum(at, first), first))
        score = tl.minimum(here, score)
        low = tl.where(group == this, INFINITY, low)
        lowest = tl.min(low, 0)
    return first


@triton.jit
def last_drawn(row, best, scale, vocab, ROUND: tl.constexpr):
    """Return the highest index of the least logit with a weight."""
    lane_least = tl.full((ROUND,), INFINITY, tl.float32)
    lane_last = tl.zeros((ROUND,), tl.int32)
    for begin in range(0, vocab, ROUND):
        x = load_block(row, begin, vocab, ROUND)
        later = (tl.exp2((x - best) * scale) >= TINY) & (x <= lane_least)
        lane_least = tl.where(later, x, lane_least)
        lane_last = tl.where(later, begin + tl.arange(0, ROUND), lane_last)
    return tl.max(tl.where(lane_least == tl.min(lane_least, 0), lane_last, 0), 0)


@triton.jit
def last_of_row(
    row, n, top, scale, raced, last_value, last_index, least, vocab, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Return the index of the least token that is kept, the last of equal ones, from the blocks' least logits."""
    number = tl.arange(0, BLOCKS)
    bottoms = load_blocks(least, n, blocks, INFINITY, BLOCKS)
    bottom = tl.min(bottoms, 0)
    begin = tl.max(tl.where(bottoms == bottom, number, 0), 0) * BLOCK
    index, x = begin + tl.arange(0, BLOCK), load_block(row, begin, vocab, BLOCK)
    matches = (x == bottom) & ((x > last_value) | (index <= last_index))
    last = tl.max(tl.where(matches, index, -1), 0)
    # A block's bounds are relative to its own best token, so more of its tokens have a weight in them.
    if (not raced) & (tl.exp2((bottom - top) * scale) < TINY):
        last = last_drawn(row, top, scale, vocab, ROUND)
    return last


@triton.jit(do_not_specialize=["vocab", "blocks"])
def finish_kernel(
    logits, temperature, top_p, min_p, seed, step,  # as in `sample_triton`
    best, mass, moment, raw,  # [N, C], of `scan_kernel`
    mode, drawn,  # [N], how far a row has come, the mass it is drawn from if it was found; None without filters
    cut, cut_index, kept,  # of rows that are not drawn by `select_kernel`, of :mod:`.strip_select`, or None
    least, bound,  # of it or of `scan_kernel`
    token, logprob, raw_logprob, entropy, last_kept,  # [N] out
    row_stride, vocab, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * row_stride
    t = tl.load(temperature + n)
    tops = load_blocks(best, n, blocks, -INFINITY, BLOCKS)
    top = tl.max(tops, 0)
    if is_valid(n, top, t, top_p, min_p):
        greedy, scale = scale_of(t)
        d, factor = rescale(tops, top, scale)
        masses = load_blocks(mass, n, blocks, 0.0, BLOCKS) * factor
        moments = load_blocks(moment, n, blocks, 0.0, BLOCKS) * factor + masses * d
        total = tl.sum(masses, 0)
        raw_total = total
        if scale != LOG2E:
            _, raw_factor = rescale(tops, top, LOG2E)
            raw_total = tl.sum(load_blocks(raw, n, blocks, 0.0, BLOCKS) * raw_factor, 0)
        kept_total = total
        ready, raced, judged = False, False, False
        floor, last_value, last_index = 0.0, -INFINITY, 0
        if mode is not None:
            state = tl.load(mode + n)
            ready, raced, judged = state == DRAWN, state >= BY_COUNT, state == JUDGED
            floor = floor_of(n, min_p)
            if ready | judged:
                kept_total = tl.load(drawn + n)
            elif raced:
                kept_total = tl.sum(load_blocks(kept, n, blocks, 0.0, BLOCKS), 0)
            if raced:
                last_value = tl.load(cut + n)
                last_index = tl.load(cut_index + n)

        number = tl.arange(0, BLOCKS)
        if greedy:
            begin = tl.min(tl.where(tops == top, number, MAX_INDEX), 0) * BLOCK
            matches = load_block(row, begin, vocab, BLOCK) == top
            first = tl.min(tl.where(matches, begin + tl.arange(0, BLOCK), MAX_INDEX), 0)
            last = first
        elif ready:
            first, last = tl.load(token + n).to(tl.int32), tl.load(last_kept + n).to(tl.int32)
        else:
            first = winner(
                row, n, top, scale, tl.load(seed + n), tl.load(step + n), raced, floor, last_value, last_index, best,
                bound, vocab, blocks, BLOCKS, BLOCK, GROUPS,
            )  # fmt: skip
            if judged:
                last = tl.load(last_kept + n).to(tl.int32)
            else:
                last = last_of_row(
                    row, n, top, scale, raced, last_value, last_index, least, vocab, blocks, BLOCKS, BLOCK, ROUND
                )
        below = tl.load(row + first).to(tl.float32) - top
        tl.store(token + n, first.to(tl.int64))
        tl.store(last_kept + n, last.to(tl.int64))
        tl.store(logprob + n, tl.where(greedy, 0.0, tl.div_rn(below, t) - tl.log(kept_total)))
        tl.store(raw_logprob + n, below - tl.log(raw_total))
        tl.store(entropy + n, tl.where(greedy, 0.0, tl.log(total) - LN2 * (tl.sum(moments, 0) / total)))
    else:
        nan = float("nan")
        tl.store(token + n, tl.full((), -1, tl.int64))
        tl.store(last_kept + n, tl.full((), -1, tl.int64))
        tl.store(logprob + n, nan)
        tl.store(raw_logprob + n, nan)
        tl.store(entropy + n, nan)


def _search(
    logits: Tensor, temperature: Tensor, filters: Sequence[Tensor | None], seed: Tensor, step: Tensor, best: Tensor,
    search: Sequence[Tensor],  # mode, window, left, beyond
    between_keys: Sequence[Tensor],  # bracket, between, counts, over
    settled: Sequence[Tensor],  # cut, ties, cut_index, drawn, last_kept
    bound: Tensor, size: tuple[int, int], blocks: int, by_mass: bool,
) -> None:  # fmt: skip
    """Search the cut of rows whose candidates do not hold it, by count or by mass; see :mod:`.strip_select`."""
    rows, (top_k, top_p, _) = len(logits), filters
    share: dict[str, Any] = {"MASS": by_mass, "BLOCKS": triton.next_power_of_2(blocks), "ROOM": ROOM}
    bracket_kernel[(rows,)](
        logits, temperature, top_k, top_p, best, *search, between_keys[0], *size, blocks,
        SAMPLE=SAMPLE, **share, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    gather_kernel[(rows, SPLITS)](
        logits, temperature, top_p, seed, step, best, search[0], *between_keys, bound, *size, blocks,
        BLOCK=BLOCK, GROUPS=GROUPS, SPLITS=SPLITS, **share, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    settle_kernel[(rows,)](
        logits, temperature, *filters, best, *search, *between_keys, *settled, *size, blocks,
        ROUND=WHOLE, SPLITS=SPLITS, **share, num_warps=16, enable_fp_fusion=True,
    )  # fmt: skip


def sample_triton(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32
    top_k: Tensor | None,  # [N] int32
    top_p: Tensor | None,  # [N] float32
    min_p: Tensor | None,  # [N] float32
    seed: Tensor,  # [N] int64
    step: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    token, last_kept = torch.empty_like(seed), torch.empty_like(seed)
    logprob, raw_logprob, entropy = (torch.empty_like(temperature) for _ in range(3))
    if rows == 0:
        return token, logprob, raw_logprob, entropy, last_kept
    blocks = triton.cdiv(vocab, BLOCK)
    many = triton.next_power_of_2(blocks)
    room = triton.cdiv(rows * blocks, 4) * 4  # each begins at 16 bytes: otherwise another kernel would be compiled
    best, mass, moment, raw, kept, least = logits.new_empty((6, room), dtype=torch.float32)
    bound = logits.new_empty((rows, blocks, GROUPS), dtype=torch.int32)
    size = (logits.stride(0), vocab)
    filters = (top_k, top_p, min_p)
    plain = all(option is None for option in filters)
    peaks = None if plain else best.new_empty((rows, blocks, BLOCK // STRIP))
    scan_kernel[(rows, blocks)](
        logits, temperature, *filters, seed, step, best, mass, moment, raw, least, bound, peaks, *size,
        BLOCK=BLOCK, GROUPS=GROUPS, STRIP=STRIP, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    mode = drawn = cut = cut_index = None
    if not plain:
        chosen, between = bound.new_empty((rows, CHOSEN)), bound.new_empty((rows, SPLITS, ROOM // SPLITS))
        drawn, left, beyond, cut = (torch.empty_like(temperature) for _ in range(4))
        mode, ties, cut_index = (bound.new_empty(rows) for _ in range(3))
        window, bracket = seed.new_empty((rows, 2)), seed.new_empty((rows, 2))
        counts, over = bound.new_empty((rows, SPLITS)), best.new_empty((rows, SPLITS, 2))
        select_kernel[(rows,)](
            logits, temperature, *filters, seed, step, best, mass, peaks, chosen, mode, window, left, beyond, cut,
            cut_index, token, last_kept, drawn, *size, blocks,
            BLOCKS=many, STRIPS=BLOCK // STRIP, STRIP=STRIP, CHOSEN=CHOSEN, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
        search, between_keys = (mode, window, left, beyond), (bracket, between, counts, over)
        settled = cut, ties, cut_index, drawn, last_kept
        for by_mass in [False] * (top_k is not None) + [True] * (top_p is not None):
            _search(
                logits, temperature, filters, seed, step, best, search, between_keys, settled, bound, size, blocks,
                by_mass,
            )  # fmt: skip
        race_kernel[(rows, SPLITS)](
            logits, temperature, min_p, seed, step, best, mode, cut, cut_index, kept, least, bound, *size, blocks,
            BLOCKS=many, BLOCK=BLOCK, GROUPS=GROUPS, SPLITS=SPLITS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    finish_kernel[(rows,)](
        logits, temperature, top_p, min_p, seed, step, best, mass, moment, raw, mode, drawn, cut, cut_index, kept,
        least, bound, token, logprob, raw_logprob, entropy, last_kept, *size, blocks,
        BLOCKS=many, BLOCK=BLOCK, GROUPS=GROUPS, ROUND=ROUND, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return token, logprob, raw_logprob, entropy, last_kept
