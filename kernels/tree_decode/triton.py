"""Triton backend: shared nodes read once, partial results merged along every row's path.

    partial  an item (schedule.py) and a key head: online softmax of its rows over a chunk of a node's keys
    merge    a row's partials in the order of its path, weighted by their log-sum-exps

Reads the keys and values of every node once for each tile of 64 queries below it, and writes and reads one fp32 partial
a (row, query head, chunk). Chunks are counted from a node's first key and partials are merged in a fixed order, so a
row's bits do not depend on the other rows.

Bound by the reading of keys and values, so the loop over tiles of keys keeps two tiles in flight while it multiplies a
third: an address needs a page's id, so these are loaded one tile earlier. The last tile reads the chunk's last key
again where there are no more keys. One warp group holds the 64 queries; two or more blocks fit on a multiprocessor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import machine
from ..tree_attention.blocks import padded_width
from ..tree_attention.triton import LN2, log2_scores
from .items import FIELDS, queries_of
from .schedule import Nodes, Work, make_schedule, programs


@triton.jit
def slots_of(begin, last, KEYS: tl.constexpr):
    """Return the slots of a tile's keys; those past ``last`` become it. Unsigned, so that pages and offsets are
    shifts."""
    return tl.minimum(begin + tl.arange(0, KEYS), last).to(tl.uint32)


@triton.jit
def attend_keys(
    query, k_from, v_from, pages, slot, count, last, newest, age, page_stride, slot_stride, scale, window, softcap,
    PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the values of an item's keys, weighted by exp2(score - largest), the largest score of each query in the
    log2 domain, and the sum of weights: [QUERIES, VALUES], [QUERIES], [QUERIES]. VALUES are WIDTH, or a number of
    columns that divides DIM."""
    columns = tl.arange(0, WIDTH)
    page = tl.load(pages + slots_of(slot, last, KEYS) // PAGE)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUES], tl.float32)
    for begin in range(0, count, KEYS):
        index = begin + tl.arange(0, KEYS)
        at = page.to(tl.uint32).to(tl.int64) * page_stride + slots_of(slot + begin, last, KEYS) % PAGE * slot_stride
        at = at[:, None]
        page = tl.load(pages + slots_of(slot + begin + KEYS, last, KEYS) // PAGE)
        if DIM == WIDTH:  # noqa: SIM108 (decided when compiling)
            key = tl.load(k_from + at)
        else:
            key = tl.load(k_from + at, mask=(columns < DIM)[None, :], other=0.0)
        scores, _ = log2_scores(tl.dot(query, key.T, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
        seen = index[None, :] <= newest[:, None]
        if HAS_WINDOW:
            seen &= index[None, :] > (age - window)[:, None]
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        probability = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(probability, 1)
        if DIM % VALUES == 0:
            value = tl.load(v_from + at)
        else:
            value = tl.load(v_from + at, mask=(columns < DIM)[None, :], other=0.0)
        acc = tl.dot(probability.to(value.dtype), value, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def add_part(acc, top, total, part, part_lse):
    """Add a partial result of rows to their sum, which is relative to the largest log-sum-exp so far. Its multiply-adds
    are written out, so that all kernels round alike."""
    new_top = tl.maximum(top, part_lse)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    keep, weight = tl.exp2(top - base), tl.exp2(part_lse - base)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), part * weight[:, None])
    return acc, new_top, tl.fma(total, keep, weight)


@triton.jit(do_not_specialize=["window"])
def partial_kernel(
    q,  # [N, Hq, D]
    k_pages,  # [P, page, Hkv, D]
    v_pages,  # [P, page, Hkv, D]
    page_ids,  # [*] int32
    query_position,  # [N] int32
    partial_begin,  # [N + 1] int32
    items,  # [1 + I, FIELDS] int32
    out,  # [partials, Hq, D] fp32
    lse,  # [partials, Hq] fp32, in the log2 domain
    q_stride, q_head, page_stride, slot_stride, head_stride,  # the last three of both, the keys and the values
    scale, window, softcap,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, QUERIES)
    head = kv_head * GROUP + within % GROUP
    k_from = k_pages + kv_head * head_stride + columns[None, :]
    v_from = v_pages + kv_head * head_stride + columns[None, :]
    for i in range(1 + tl.program_id(1), 1 + tl.load(items), tl.num_programs(1)):
        item = items + i * FIELDS
        pages = page_ids + tl.load(item)
        slot, count, position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        first_row, rows, before = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        live = within < rows * GROUP
        row = first_row + within // GROUP
        inside = live[:, None] & (columns < DIM)[None, :]
        query = tl.load(
            q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * q_head + columns[None, :], mask=inside, other=0.0
        )
        # A row sees the existing keys up to its own position; both are counted from the item's first key.
        age = tl.load(query_position + row, mask=live, other=-1) - position
        newest = tl.where(live, tl.minimum(age, count - 1), -1)
        last = slot + count - 1
        acc, top, total = attend_keys(
            query, k_from, v_from, pages, slot, count, last, newest, age, page_stride, slot_stride, scale, window,
            softcap, PAGE, DIM, WIDTH, WIDTH, QUERIES, KEYS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        saw = total != 0.0
        to = (tl.load(partial_begin + row, mask=live, other=0) + before).to(tl.int64) * HEADS + head
        acc = acc * (1.0 / tl.where(saw, total, 1.0))[:, None]
        tl.store(out + to[:, None] * DIM + columns[None, :], acc, mask=inside)
        log_sum = tl.where(saw, top + tl.log2(tl.where(saw, total, 1.0)), -float("inf"))
        tl.store(lse + to, log_sum, mask=live)


@triton.jit
def merge_kernel(
    partial_out,  # [partials, Hq, D] fp32
    partial_lse,  # [partials, Hq] fp32, in the log2 domain
    partial_begin,  # [N + 1] int32
    out,  # [N, Hq, D]
    lse,  # [N, Hq] fp32
    HEADS: tl.constexpr, SOME: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    columns = tl.arange(0, WIDTH)
    exists = head < HEADS
    inside = exists[:, None] & (columns < DIM)[None, :]
    top = tl.full([SOME], -float("inf"), tl.float32)
    total = tl.zeros([SOME], tl.float32)
    acc = tl.zeros([SOME, WIDTH], tl.float32)
    begin, end = tl.load(partial_begin + row).to(tl.int64), tl.load(partial_begin + row + 1).to(tl.int64)
    for i in range(begin, end):
        which = i * HEADS + head
        part_lse = tl.load(partial_lse + which, mask=exists, other=-float("inf"))
        part = tl.load(partial_out + which[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
        acc, top, total = add_part(acc, top, total, part, part_lse)
    saw = total != 0.0
    acc = acc * (1.0 / tl.where(saw, total, 1.0))[:, None]
    to = row * HEADS + head
    tl.store(out + to[:, None] * DIM + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)
    log_sum = tl.where(saw, (top + tl.log2(tl.where(saw, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + to, log_sum, mask=exists)


def tree_decode(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    nodes: Nodes,
    work: Work,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Like `reference.tree_decode`; float32, bfloat16 or float16.

    Raises:
        ValueError: keys and values have different strides.
    """
    group = q.shape[1] // k_pages.shape[2]
    if work.partial_begin is None or work.items is None or work.parent is not None:
        work = make_schedule(nodes, group)
    return attend(q, k_pages, v_pages, nodes.page_ids, nodes.query_position, work, scale, window, softcap)


def attend(
    q: Tensor,  # [N, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    page_ids: Tensor,  # [*] int32
    query_position: Tensor,  # [N] int32
    work: Work,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Run the items of ``work`` and merge their partials; the result is like that of `reference.tree_decode`.

    Raises:
        ValueError: keys and values have different strides.
    """
    if machine.interpreting() and q.dtype == torch.bfloat16:  # the interpreter multiplies bit patterns of bf16 operands
        q32, k32, v32 = q.float(), k_pages.float(), v_pages.float()
        out, lse = attend(q32, k32, v32, page_ids, query_position, work, scale, window, softcap)
        return out.to(q.dtype), lse
    rows, heads, dim = q.shape
    kv_heads = k_pages.shape[2]
    out, lse = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if rows == 0 or work.partials == 0:
        return out.zero_(), lse.fill_(-float("inf"))
    if k_pages.stride() != v_pages.stride():
        raise ValueError(
            "tree_decode_attention: k_pages and v_pages must have the same strides; one address serves both."
        )
    group = heads // kv_heads
    partial_begin, items, partials, *_ = work
    partial_out = q.new_empty((partials, heads, dim), dtype=torch.float32)
    partial_lse = q.new_empty((partials, heads), dtype=torch.float32)
    width, queries = padded_width(dim), queries_of(group)
    keys, warps = tile_of(width, queries, q.dtype)
    partial_kernel[(kv_heads, programs(q.device, kv_heads))](
        q, k_pages, v_pages, page_ids, query_position, partial_begin, items, partial_out, partial_lse,
        *q.stride()[:2], *k_pages.stride()[:3], scale, window or 0, softcap or 0.0,
        PAGE=k_pages.shape[1], HEADS=heads, GROUP=group, DIM=dim, WIDTH=width, QUERIES=queries,
        KEYS=keys, FIELDS=FIELDS, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        num_warps=warps, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    together = min(8, triton.next_power_of_2(heads))
    merge_kernel[(rows, triton.cdiv(heads, together))](
        partial_out, partial_lse, partial_begin, out, lse,
        HEADS=heads, SOME=together, DIM=dim, WIDTH=width, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def tile_of(width: int, queries: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return keys of a tile and warps, such that nothing spills (tests/kernels/aot) and warps share no row of
    queries."""
    if dtype == torch.float32:
        return 16, 4
    return 64 if width <= 128 else 32, queries // 16
